"""Fill the tables of docs/theory/leakage.md from the committed rows; with --check, only compare."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paper_results import RESULTS, ROOT, Row, build, markdown, own_rows

from gradveil.paper.base import Verdict

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


def _listed(verdicts: Sequence[Verdict]) -> str:
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
    for name, block in BLOCKS.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"The page must have the markers {begin} and {end} once each.")
        fresh = f"{begin}\n\n{block(folder)}\n\n{end}"
        text = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, fresh=fresh: fresh, text, flags=re.DOTALL)
    return text


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = PAGE.read_text()
    fresh = filled(text)
    if parser.parse_args().check:
        print("leakage.md is up to date" if fresh == text else "docs/theory/leakage.md is stale: run `make docs`")
        return int(fresh != text)
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
