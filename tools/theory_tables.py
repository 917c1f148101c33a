"""Fill the measured parts of docs/theory/certificates.md and convergence.md; with --check, only compare."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from marked_blocks import fill, write_or_check
from paper_results import RESULTS, ROOT, Row, build, markdown, own_rows, runs

from gradveil.seeds import Seeds
from gradveil_studies.paper.base import Context, Item
from gradveil_studies.paper.convergence import smoothed

MISSING = "Not run at full size yet."
BENCH = ROOT / "studies" / "bench" / "results" / "certificates.json"
THEORY = ROOT / "docs" / "theory"
Block = Callable[[Path], str]


def _item(name: str) -> Block:
    """Return an item's table, what follows from it, its figure, and the command that makes it."""

    def block(folder: Path) -> str:
        rows = own_rows(name, folder)
        if not rows:
            return f"{MISSING} To run it: `gradveil reproduce {name} --scale full`."
        item = build(name, folder)
        parts = [*_missing(item, rows), markdown(item.summary(rows))]
        parts += [f"- **{v.status}**: {v.claim}. {v.ours}. Rule: {v.rule}." for v in item.verdicts(rows)]
        if (folder / name / f"{name}.svg").exists():
            parts.append(f"![{item.title}](../results/{name}/{name}.svg)")
        parts += [f"`{run['command']}`, {run['date'][:10]}, {run['machine']}." for run in _distinct(name, folder)]
        return "\n\n".join(parts)

    return block


def _missing(item: Item, rows: list[Row]) -> list[str]:
    """Say which units of work the rows do not hold; nothing where they hold all."""
    wanted = item.units(Context(None, torch.device("cpu"), "full", Seeds(0)))
    left = [unit for unit in wanted if unit not in {row.get("unit") for row in rows}]
    names = ", ".join(f"`{unit}`" for unit in left[:6]) + (" and others" if len(left) > 6 else "")
    return (
        [f"**Not complete**: {len(left)} of {len(wanted)} units of work have not been run ({names})."] if left else []
    )


def _distinct(name: str, folder: Path) -> list[Row]:
    """Return the runs of an item, those that differ in their units of work only once."""
    return list({(run["command"], run["machine"]): run for run in runs(name, folder)}.values())


def _constants(folder: Path) -> str:
    row = next((r for r in own_rows("convergence", folder) if r["kind"] == "constants"), None)
    if row is None:
        return MISSING
    lines: list[Row] = [
        {"constant": symbol, "value": f"{c['value']:.4g}", "known": c["how"], "from": c["note"]}
        for symbol, c in row["known"].items()
    ]
    error = row["output"] * row["displacement"]
    lines += [
        {"constant": "κ", "value": f"{row['smoothness'] / row['convexity']:.3g}", "known": "bounded", "from": "L/μ"},
        {"constant": "δ = Λ_s ρ", "value": f"{error:.3g}", "known": "bounded", "from": "the most a gradient is moved"},
        {"constant": "‖b̄(W*)‖", "value": f"{row['bias at the optimum']:.3g}", "known": "measured", "from": "at Ŵ"},
        {"constant": "F*", "value": f"{row['lowest']:.5g}", "known": "bounded",
         "from": f"F(Ŵ), which is at most {row['uncertain']:.1g} above it"},
        {"constant": "F(W_0) − F*", "value": f"{row['start'] - row['lowest']:.4g}", "known": "measured", "from": ""},
    ]  # fmt: skip
    return markdown(lines)


def _turn(folder: Path) -> str:
    """Say where the long defended run turns up, and where the undefended one ends; means of five stored rounds."""
    rows = [r for r in own_rows("convergence", folder) if r["kind"] == "long"]
    ours, none = ([r for r in rows if r["defense"] == d] for d in ("ours", "none"))
    if not ours or not none:
        return MISSING
    losses, plain = (smoothed([r["loss"] for r in mine]) for mine in (ours, none))
    at = losses.index(min(losses))
    first, last = (ours[i]["round"] for i in (at, at + len(ours) - len(losses)))
    turned = losses[-1] > 1.02 * losses[at]
    text = f"Defended, constant step {ours[0]['lr']:g}: the loss is lowest around rounds {first} to {last}, "
    text += f"{losses[at]:.3f}, and {losses[-1]:.3f} at the end, round {ours[-1]['round']}: "
    text += "it turns up again." if turned else "it does not turn up."
    return (
        text
        + f" Undefended: {min(plain):.3f} at the lowest, {plain[-1]:.3f} at the end. (Means of five stored rounds.)"
    )


TIMES = ("model", "input", "what", "ms per image", "training step of 32 (ms)", "steps per image", "steps per call")


def _timing(path: Path = BENCH) -> str:
    if not path.exists():
        return "Not run yet. To run it: `python studies/bench/certificates.py`."
    found = json.loads(path.read_text())
    table = markdown([{key: row[key] for key in TIMES} for row in found["rows"]])
    aims = [
        f"- {t['target']}: {t['got']:g}, aim at most {t['wanted']:g}, {'met' if t['met'] else '**not met**'}."
        for t in found["targets"]
    ]
    return "\n".join([table, "", *aims, "", f"On {found['machine']}."])


PAGES: dict[str, dict[str, Block]] = {
    "certificates.md": {
        "certificates": _item("certificates"),
        "meter": _item("meter"),
        "timing": lambda folder: _timing(),
    },
    "convergence.md": {"constants": _constants, "turn": _turn, "convergence": _item("convergence")},
}


def filled(text: str, blocks: dict[str, Block], folder: Path = RESULTS) -> str:
    """Return a page with every marked block made anew."""
    return fill(text, {name: block(folder) for name, block in blocks.items()})


if __name__ == "__main__":
    fresh = {THEORY / name: filled((THEORY / name).read_text(), blocks) for name, blocks in PAGES.items()}
    sys.exit(write_or_check(fresh, __doc__))
