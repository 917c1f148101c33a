"""What is made on the pages under docs, and the data beside them: `make docs`.

    python tools/pages.py [--check] [--slow]

`BLOCKS` fills what stands between two marks of a page. `DATA` writes JSON, which the site shows as tables with a filter
(tools/site_pages.py): sections of Markdown and tables. `--check` only says what is stale; the compatibility of models
takes minutes and is made with `--slow` alone.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from items import item_sections, overview
from results import BOARD, RESULTS, ROOT, Row, own_rows, promise_rows, runs
from verdict_lines import lines

from gradveil.cli.list import everything
from gradveil.integrations.flower.settings import FlowerSettings
from gradveil.integrations.flower.site import FILES, REGISTRIES, SITE, WORDS
from gradveil.ranges import hints_of, names_of, range_of
from gradveil.threats.rows import group
from gradveil_studies.leaderboard.board import Leaderboard
from gradveil_studies.leaderboard.entries import BATCHES, ENTRIES, MULTIPLES, PANELS, Panel
from gradveil_studies.leaderboard.standings import Standing, standings, table, tier_table
from gradveil_studies.paper.base import Context
from gradveil_studies.paper.convergence import smoothed

DOCS, BENCH = ROOT / "docs", ROOT / "studies" / "bench" / "results"
MISSING = "Not run at full size yet."
Block = Callable[[Path], str]
Part = str | list[Row]  # Markdown, or a table


def say_ranges(ranges: dict[str, str]) -> str:
    """Return which numbers the settings take, settings of one range together."""
    names: dict[str, list[str]] = {}
    for name, within in ranges.items():
        names.setdefault(within, []).append(name)
    return "; ".join(f"{', '.join(of)} {within}" for within, of in names.items())


def markdown(rows: list[Row]) -> str:
    """Return rows as a Markdown table; a row may leave columns out."""
    if not rows:
        return "No line to show."
    columns, cells = _cells(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in cells])


def _cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[str(row.get(key, "")) for key in columns] for row in rows]


def cell(value: object) -> str:
    """Return a value as the text of a table's cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Return a page with every marked block made anew; each marker must be there once."""
    for name, block in blocks.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"The page must have the markers {begin} and {end} once each.")
        fresh = f"{begin}\n\n{block}\n\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, fresh=fresh: fresh, text, flags=re.DOTALL)
    return text


def sections(parts: Mapping[str, list[Part]]) -> str:
    """Return sections as JSON, a line for each row of a table, so that a change can be read."""
    made = [
        {
            "title": title,
            "parts": [p if isinstance(p, str) else dict(zip(("columns", "rows"), _cells(p), strict=True)) for p in of],
        }
        for title, of in parts.items()
    ]
    text = json.dumps(made, ensure_ascii=False, indent=1)
    flat = re.compile(r"\[\n\s+(\"(?:[^\"\\]|\\.)*\"(?:,\n\s+\"(?:[^\"\\]|\\.)*\")*)\n\s+\]")
    return flat.sub(lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text) + "\n"


def _plain(part: Part) -> str | dict[str, Any]:
    return part if isinstance(part, str) else dict(zip(("columns", "rows"), _cells(part), strict=True))


# what the registry says

TITLES = {
    "dataset": "Data sets",
    "partition": "Partitions",
    "model": "Models",
    "defense": "Defences",
    "attack": "Attacks",
    "loss": "Losses",
    "engine": "Engines of federated averaging",
    "aggregator": "Aggregators",
    "schedule": "Learning-rate schedules",
    "metric": "Metrics",
}


def methods() -> dict[str, list[Part]]:
    """Return one table a kind, made from the registry."""
    found: dict[str, list[Part]] = {}
    for kind, title in TITLES.items():
        rows = [
            {
                "name": f"`{row['name']}`",
                "settings (default)": ", ".join(f"`{k}={v}`" for k, v in row["settings"].items()),
                "numbers": say_ranges(row["ranges"]),
                "what it is": row["about"],
            }
            for row in everything()
            if row["kind"] == kind
        ]
        found[title] = [rows]
    return found


def names(_: Path) -> str:
    """Return the names of each kind."""
    rows = everything()
    return markdown(
        [
            {"kind": title, "names": ", ".join(f"`{row['name']}`" for row in rows if row["kind"] == kind)}
            for kind, title in TITLES.items()
        ]
    )


SERVERS_ALONE = {
    "strategy", "audit", "audit_sample", "audit_max_examples", "max_change", "max_examples", "deadline", "min_replies",
    "resume", "out", "schedule",
}  # fmt: skip


def node_settings(_: Path) -> str:
    """Return who may set what of a run config on a node, and the settings that name files."""
    rows: list[Row] = []
    for field in dataclasses.fields(FlowerSettings):
        kind = hints_of(FlowerSettings)[field.name]
        within = str(range_of(kind) or names_of(kind))
        who = "the run; a node does not use it" if field.name in SERVERS_ALONE else "the run"
        if field.name == "data":
            who, within = "the site", "a folder; the run's is that of the server"
        elif field.name in REGISTRIES:
            over = field.name in (*SITE, "defense")
            who += "; the site above it" if over else ""
            within = "a registered name without files or code; the site: anything" if over else "a registered name"
        name = f"`{field.name.replace('_', '-')}`"
        rows.append({"key of the run config": name, "who may set it": who, "what it may be": within})
    files = [f"`{kind}:{name}=`" for kind, names in FILES.items() for name in sorted(names)]
    files += [
        f"`{kind}:{name}=` but for {', '.join(words)}" for kind, of in WORDS.items() for name, words in of.items()
    ]
    site = ", ".join(f"`{name}`" for name in SITE)
    return f"{markdown(rows)}\n\nOnly the site sets: {site}, and what names a file: {', '.join(files)}."


# what the benches measured

# federated: (suffix of the result file, model, engine) -> at least so many times the sequential loop
SPEEDUPS = {
    ("", "lenet", "processes"): 1.8,
    ("", "leaknet", "processes"): 1.35,
    ("-cuda", "lenet", "vectorised"): 20.0,
    ("-cuda", "leaknet", "vectorised"): 30.0,
}


def targets(path: Path) -> list[tuple[str, str, float, bool]]:
    """Return (what, wanted, measured, met) for each promise that a result file speaks of."""
    found = json.loads(path.read_text())
    rows = []
    for t in found.get("targets", []):
        if "row" in t:
            _, method, model, batch = t["row"]
            what = f"leak scores, {method}, {model}, batch {batch}: training steps"
            rows.append((what, f"≤ {t['at_most']:g}", t["measured"], t["met"]))
        else:
            sense = "≥" if "speedup" in t["target"] or "times" in t["target"] else "≤"
            rows.append((t["target"], f"{sense} {t['wanted']:g}", t["got"], t["met"]))
    for row in found.get("per_round", []):
        suffix = "-cuda" if path.stem.endswith("-cuda") else ""
        wanted = SPEEDUPS.get((suffix, row["model"].partition(":")[0], row["engine"]))
        if wanted:
            what = f"federated round, {row['model'].partition(':')[0]}, {row['engine']}: times sequential"
            rows.append((what, f"≥ {wanted:g}", row["speedup"], row["speedup"] >= wanted))
    return rows


def speed(_: Path) -> str:
    """Return what was aimed at and what was measured."""
    rows = []
    for path in sorted(BENCH.glob("*.json")):
        device = "H200" if path.stem.endswith("-cuda") else "2 CPU cores"
        for what, wanted, measured, met in targets(path):
            answer = "yes" if met else "**no**"
            rows.append({"what": what, "aim": wanted, "measured": f"{measured:.3g}", "met": answer, "on": device})
    return markdown(rows)


SHOWN = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}


def _planted() -> list[Row]:
    rows: list[Row] = json.loads((BENCH / "malicious.json").read_text())["rows"]
    return rows


def malicious_batches(_: Path) -> str:
    """Return a line for each attack by planted weights, network and data set."""
    found: dict[tuple[str, str, str], Row] = {}
    for r in (r for r in _planted() if r["defense"] == "none"):
        name, _, _ = r["attack"].partition(",")
        line = found.setdefault((name, r["model"], r["data"]), {"attack": f"`{name}`", "network": r["model"]})
        line["data"] = SHOWN[r["data"]]
        if name.startswith("fishing"):
            line[f"{r['batch']}" if r["classes"] == "any classes" else "8 classes"] = f"one: {r['one']:.0%}"
        else:
            line[str(r["batch"])] = f"{r['share']:.0%}"
    columns = ("attack", "network", "data", "1", "8 classes", "8", "64", "256")
    return markdown([{c: line.get(c, "–") for c in columns} for line in found.values()])


def malicious_defences(_: Path) -> str:
    """Return a line for each defence, at batches of 8: the three data sets one after the other."""
    found: dict[str, Row] = {}
    for r in (r for r in _planted() if r["defense"] != "none"):
        name = r["attack"].partition(":")[0]
        line = found.setdefault(r["defense"], {"defence": f"`{r['defense']}`" if ":" in r["defense"] else r["defense"]})
        value = r["one"] if name == "fishing" else r["share"]
        line[name] = f"{line[name]} / {value:.0%}" if name in line else f"{value:.0%}"
    return markdown(list(found.values()))


TIMES = ("model", "input", "what", "ms per image", "training step of 32 (ms)", "steps per image", "steps per call")


def certificate_times(_: Path, path: Path = BENCH / "certificates.json") -> str:
    """Return what certificates cost."""
    if not path.exists():
        return "Not run yet. To run it: `python studies/bench/certificates.py`."
    found = json.loads(path.read_text())
    shown = markdown([{key: row[key] for key in TIMES} for row in found["rows"]])
    aims = [
        f"- {t['target']}: {t['got']:g}, aim at most {t['wanted']:g}, {'met' if t['met'] else '**not met**'}."
        for t in found["targets"]
    ]
    return "\n".join([shown, "", *aims, "", f"On {found['machine']}."])


# what the committed rows say


def constants(folder: Path) -> str:
    """Return the constants of theorems A and B, and how each is known."""
    row = next((r for r in own_rows("convergence", folder) if r["kind"] == "constants"), None)
    if row is None:
        return MISSING
    found: list[Row] = [
        {"constant": symbol, "value": f"{c['value']:.4g}", "known": c["how"], "from": c["note"]}
        for symbol, c in row["known"].items()
    ]
    error = row["output"] * row["displacement"]
    found += [
        {"constant": "κ", "value": f"{row['smoothness'] / row['convexity']:.3g}", "known": "bounded", "from": "L/μ"},
        {"constant": "δ = Λ_s ρ", "value": f"{error:.3g}", "known": "bounded", "from": "the most a gradient is moved"},
        {"constant": "‖b̄(W*)‖", "value": f"{row['bias at the optimum']:.3g}", "known": "measured", "from": "at Ŵ"},
        {"constant": "F*", "value": f"{row['lowest']:.5g}", "known": "bounded",
         "from": f"F(Ŵ), which is at most {row['uncertain']:.1g} above it"},
        {"constant": "F(W_0) − F*", "value": f"{row['start'] - row['lowest']:.4g}", "known": "measured", "from": ""},
    ]  # fmt: skip
    return markdown(found)


def turn(folder: Path) -> str:
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


DEALT = (
    "{dataset}: {devices} devices of {records} records, {clients} a round, {rounds} rounds, learning rates {lrs}, "
    "{seeds} seeds, {victims} records sought ({newton}; {pairs} pairs to learn from)."
)


def board(folder: Path = RESULTS) -> dict[str, list[Part]]:
    """Return the leaderboard: a section a data set, the promises that were priced, and where the rows come from."""
    found = standings(own_rows(BOARD, folder))
    made: dict[str, list[Part]] = {}
    for panel in (panel for some in PANELS.values() for panel in some):
        named = {one.defense: one for one in found if one.dataset == panel.dataset}
        mine = [named.get(e.name, Standing(panel.dataset, e.name)) for e in (*ENTRIES, BATCHES)]
        if not named:
            made[panel.dataset] = ["Not run."]
            continue
        made[panel.dataset] = [_dealt(panel), _without(table(mine)), *_edges(mine), *_untrained(mine)]
        made[panel.dataset] += ["The strongest server of each tier (error / blind guess, share picked of 100):"]
        made[panel.dataset] += [_without(tier_table(mine))]
    for (dataset,), mine in group(promise_rows(), "dataset").items():
        made[f"promises: {dataset}"] = [_without(table(standings(mine)))]
    changes = (RESULTS / BOARD / "changes.txt").read_text().rstrip("\n")
    return made | {"changes of the rules": [changes], "where the rows come from": [_made(folder)]}


def _dealt(panel: Panel) -> str:
    lrs = "/".join(f"{panel.lr * m:g}" for m in MULTIPLES)
    told = {name: getattr(panel, name) for name in ("devices", "records", "clients", "rounds", "seeds", "victims")}
    return DEALT.format(dataset=panel.dataset, lrs=lrs, newton=panel.newton, pairs=panel.pairs, **told)


def _without(rows: list[Row]) -> list[Row]:
    """Return a table without the data set, which stands above it, and without what no row has."""
    empty = {"data", *(key for key in rows[0] if key == "step" and all(row[key] == "–" for row in rows))}
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]


def _edges(found: list[Standing]) -> list[str]:
    at = [f"{one.defense} ({split})" for one in found for split, cost in one.costs.items() if cost.edge]
    said = "The rate chosen is the smallest or largest of those tried, so a better one may lie beyond"
    return [f"{said}: {', '.join(at)}."] if at else []


def _untrained(found: list[Standing]) -> list[str]:
    some = [(one, split, why) for one in found for split, why in one.untrained.items() if split not in one.costs]
    return [f"{one.defense} did not train ({split}): {why}" for one, split, why in some]


def _made(folder: Path) -> str:
    done = {row["unit"] for row in own_rows(BOARD, folder)}
    said = [
        f"- `{run['command']}` ({len(run['units'])} units of work; seed {run['seed']}, {run['date']}, "
        f"{run['machine']}; commit {run['commit']}, {', '.join(run['versions'])})"
        for run in runs(BOARD, folder)
    ]
    for scale in PANELS:
        units = Leaderboard().units(Context(scale=scale))
        said.append(f"- `--scale {scale}`: {len(done & set(units))} of {len(units)} units of work were run.")
    return "\n".join(said)


def board_errors(folder: Path) -> str:
    """Return the attacks that got below a certificate."""
    found = standings(own_rows(BOARD, folder))
    said = [(one, text) for one in found for text in (*one.beaten, *one.errors)]
    held = any(one.account is not None and one.got for one in found)
    none = "None: no attack got below a certificate." if held else "No certificate has been held against an attack yet."
    return "\n".join(f"- **error**: {one.defense} on {one.dataset}: {text}." for one, text in said) or none


# what works with which model


def compatibility() -> dict[str, list[Part]]:
    """Return the test matrix over the zoo of models: what does not work, then every cell. Takes minutes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from compatibility.page import matrix, refusals
    from compatibility.zoo import ZOO

    found = matrix()
    made: dict[str, list[Part]] = {}
    for family, rows in found.items():
        parts: list[Part] = []
        for kind, models in groupby(ZOO.values(), lambda model: model.group):
            parts.append([{kind: m.name} | {f"`{k}`": mark for k, mark in rows[m.name].items()} for m in models])
        made[family.capitalize()] = [*parts, "What the refusals say:", "\n".join(refusals(family))]
    return made


def not_working(_: Path) -> str:
    """Return, for each method, how many models it is right for and which it refuses."""
    table = []
    for section in json.loads((DOCS / "compatibility.json").read_text()):
        cells: dict[str, list[tuple[str, str]]] = {}
        for part in (part for part in section["parts"] if isinstance(part, dict)):
            for model, *marks in part["rows"]:
                for name, mark in zip(part["columns"][1:], marks, strict=True):
                    cells.setdefault(name, []).append((model, mark))
        for name, found in cells.items():
            count = {mark: sum(m == mark for _, m in found) for mark in ("yes", "no", "–")}
            refused = [model for model, mark in found if mark == "no"]
            shown = ", ".join(refused) if len(refused) <= 16 else f"{len(refused)} models"
            table.append({section["title"].lower(): name} | count | {"refused for": shown})
    by_family: dict[str, list[Row]] = {}
    for row in table:
        by_family.setdefault(next(iter(row)), []).append(row)
    return "\n\n".join(markdown(rows) for rows in by_family.values())


BLOCKS: dict[str, dict[str, Block]] = {
    "methods.md": {"names": names},
    "speed.md": {"speed": speed},
    "compatibility.md": {"refused": not_working},
    "how-to/train-with-flower.md": {"node settings": node_settings},
    "how-to/malicious-servers.md": {"malicious: batches": malicious_batches, "malicious: defences": malicious_defences},
    "theory/certificates.md": {"timing": certificate_times},
    "theory/convergence.md": {"constants": constants, "turn": turn},
    "results/paper.md": {"items": overview, "lines": lambda folder: "\n".join(lines(folder))},
    "results/leaderboard.md": {"errors": board_errors},
}
DATA: dict[str, Callable[[], dict[str, list[Part]]]] = {
    "methods.json": methods,
    "results/items.json": item_sections,
    "results/leaderboard.json": board,
}
SLOW: dict[str, Callable[[], dict[str, list[Part]]]] = {"compatibility.json": compatibility}


def filled(name: str, folder: Path = RESULTS, text: str | None = None) -> str:
    """Return a page with every marked block made anew, from the committed rows or those of another folder."""
    text = (DOCS / name).read_text() if text is None else text
    return fill(text, {block: make(folder) for block, make in BLOCKS[name].items()})


def main() -> int:
    """Write what is stale, or say it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what is stale")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes")
    given = parser.parse_args()
    stale = []
    data = {name: (lambda make=make: sections(make())) for name, make in (DATA | (SLOW if given.slow else {})).items()}
    pages: dict[str, Any] = data | {name: (lambda name=name: filled(name)) for name in BLOCKS}
    for name, make in pages.items():
        path, text = DOCS / name, make()
        if path.exists() and path.read_text() == text:
            continue
        stale.append(name)
        if not given.check:
            path.write_text(text)
    if given.check and stale:
        print(f"Stale: {', '.join(stale)}. Run `make docs`.")
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
