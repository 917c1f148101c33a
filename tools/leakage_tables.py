"""Fill the tables of docs/theory/leakage.md from the committed rows; with --check, only compare."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from marked_blocks import fill, write_or_check
from paper_results import RESULTS, ROOT, Row, build, markdown, own_rows

from gradveil_studies.paper.base import Judgement

PAGE = ROOT / "docs" / "theory" / "leakage.md"
MISSING = "Not run at full size yet."
Block = Callable[[Path], str]


def _table1(keep: Callable[[str], bool]) -> Block:
    """Return the lines of table 1 whose layer is wanted."""

    def block(folder: Path) -> str:
        lines = [line for line in build("table1", folder).summary(own_rows("table1", folder)) if keep(line["layer"])]
        return markdown(lines) if lines else MISSING

    return block


def _classes(folder: Path) -> str:
    """Return exact class sets: one line a setting, one column a rule."""
    rows = [row for row in own_rows("table1", folder) if row["layer"] == "classes"]
    rules = [key for key in rows[0] if key in ("gap", "mean", "bias_sign", "row_sum")] if rows else []
    lines: list[Row] = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        shares = {rule: f"{sum(row[rule] for row in mine) / len(mine):.3f}" for rule in rules}
        lines.append({"setting": setting} | shares | {"seeds": len(mine)})
    return markdown(lines) if lines else MISSING


def _parts(folder: Path) -> str:
    lines = build("figure-wg-clg-rep", folder).summary(own_rows("figure-wg-clg-rep", folder))
    return markdown(lines) if lines else MISSING


def _verdicts(name: str) -> Block:
    def block(folder: Path) -> str:
        return _listed(build(name, folder).verdicts(own_rows(name, folder)))

    return block


def _listed(verdicts: Sequence[Judgement]) -> str:
    return "\n".join(f"- **{v.status}**: {v.claim}. {v.ours}." for v in verdicts) or MISSING


BLOCKS: dict[str, Block] = {
    "dense": _table1(lambda layer: layer.startswith("fc")),
    "classes": _classes,
    "convolutions": _table1(lambda layer: layer.startswith("conv")),
    "parts": _parts,
    "parts verdicts": _verdicts("figure-wg-clg-rep"),
    "verdicts": _verdicts("table1"),
}


def filled(text: str, folder: Path = RESULTS) -> str:
    """Return the page with every marked block made anew."""
    return fill(text, {name: block(folder) for name, block in BLOCKS.items()})


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: filled(PAGE.read_text())}, __doc__))
