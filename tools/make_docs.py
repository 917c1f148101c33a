"""Write docs/methods.md from the registry; with --check, only say whether it is up to date."""

import argparse
import sys
from pathlib import Path

from gradveil.cli.list import everything, say_ranges

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
PAGE = Path(__file__).parent.parent / "docs" / "methods.md"


def page() -> str:
    """Return one table per kind, made from the registry."""
    lines = ["# All methods", "", "Made from the registry by `make docs`; `gradveil list` shows the same.", ""]
    lines += ["A number outside its range is refused in one line; where no upper end is given it is 10⁹.", ""]
    rows = everything()
    for kind, title in TITLES.items():
        lines += [f"## {title}", "", "| name | settings (default) | numbers | what it is |", "|---|---|---|---|"]
        for row in (r for r in rows if r["kind"] == kind):
            settings = ", ".join(f"`{k}={v}`" for k, v in row["settings"].items())
            lines.append(f"| `{row['name']}` | {settings} | {say_ranges(row['ranges'])} | {row['about']} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        fresh = PAGE.exists() and PAGE.read_text() == page()
        print("docs/methods.md is up to date" if fresh else "docs/methods.md is stale: run `make docs`")
        return 0 if fresh else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
