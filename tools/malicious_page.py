"""Fill the tables of docs/how-to/malicious-servers.md from studies/bench/results; --check: only say if it is stale."""

import json
import sys
from typing import Any

from marked_blocks import ROOT, fill, write_or_check
from paper_results import markdown

PAGE = ROOT / "docs" / "how-to" / "malicious-servers.md"
DATA = {"digits": "digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
Row = dict[str, Any]


def tables() -> dict[str, str]:
    """Return what is recovered, by batch, and under each defence."""
    rows: list[Row] = json.loads((ROOT / "studies" / "bench" / "results" / "malicious.json").read_text())["rows"]
    return {"malicious: batches": batches(rows), "malicious: defences": defences(rows)}


def batches(rows: list[Row]) -> str:
    """Return a line for each attack, network and data set."""
    lines: dict[tuple[str, str, str], Row] = {}
    for r in (r for r in rows if r["defense"] == "none"):
        name, _, _ = r["attack"].partition(",")
        line = lines.setdefault((name, r["model"], r["data"]), {"attack": f"`{name}`", "network": r["model"]})
        line["data"] = DATA[r["data"]]
        if name.startswith("fishing"):
            line[f"{r['batch']}" if r["classes"] == "any classes" else "8 classes"] = f"one: {r['one']:.0%}"
        else:
            line[str(r["batch"])] = f"{r['share']:.0%}"
    columns = ("attack", "network", "data", "1", "8 classes", "8", "64", "256")
    return markdown([{c: line.get(c, "–") for c in columns} for line in lines.values()])


def defences(rows: list[Row]) -> str:
    """Return a line for each defence, at batches of 8: the three data sets one after the other."""
    lines: dict[str, Row] = {}
    for r in (r for r in rows if r["defense"] != "none"):
        name = r["attack"].partition(":")[0]
        line = lines.setdefault(r["defense"], {"defence": f"`{r['defense']}`" if ":" in r["defense"] else r["defense"]})
        value = r["one"] if name == "fishing" else r["share"]
        line[name] = f"{line[name]} / {value:.0%}" if name in line else f"{value:.0%}"
    return markdown(list(lines.values()))


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: fill(PAGE.read_text(), tables())}, __doc__))
