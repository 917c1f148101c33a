"""Fill the table of docs/speed.md from studies/bench/results; with --check, only say whether it is up to date."""

import json
import sys
from pathlib import Path

from marked_blocks import ROOT, fill, write_or_check
from paper_results import markdown

PAGE = ROOT / "docs" / "speed.md"

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


def speed() -> str:
    """Return what was aimed at and what was measured."""
    rows = []
    for path in sorted((ROOT / "studies" / "bench" / "results").glob("*.json")):
        device = "H200" if path.stem.endswith("-cuda") else "2 CPU cores"
        for what, wanted, measured, met in targets(path):
            answer = "yes" if met else "**no**"
            rows.append({"what": what, "aim": wanted, "measured": f"{measured:.3g}", "met": answer, "on": device})
    return markdown(rows)


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: fill(PAGE.read_text(), {"speed": speed()})}, __doc__))
