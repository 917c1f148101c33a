"""Fill the tables of README.md from the results on disk; with --check, only say whether they are up to date."""

import json
import re
import sys
from pathlib import Path

from marked_blocks import ROOT, write_or_check
from paper_results import build, markdown, own_rows

from gradveil.paper.rows import same_defense

README = ROOT / "README.md"


SHOWN = {  # of a long table, what the README has room for
    "accuracy": (
        "none", "representation:share=0.1", "representation:share=0.4", "representation:share=0.8",
        "random_mask:share=0.4", "pruning:share=0.8", "pruning:share=0.9", "gaussian:scale=0.1",
        "gaussian:scale=0.01,on=weights", "gaussian:scale=0.1,on=weights",
    ),
}  # fmt: skip


def summary(item: str) -> str:
    """Return the summary of an item's committed rows."""
    table = build(item).summary(own_rows(item))
    shown = set(map(same_defense, SHOWN.get(item, ())))
    return markdown([row for row in table if not shown or same_defense(row["defense"]) in shown])


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
    for path in sorted((ROOT / "bench" / "results").glob("*.json")):
        device = "H200" if path.stem.endswith("-cuda") else "2 CPU cores"
        for what, wanted, measured, met in targets(path):
            answer = "yes" if met else "**no**"
            rows.append({"what": what, "aim": wanted, "measured": f"{measured:.3g}", "met": answer, "on": device})
    return markdown(rows)


def filled(text: str) -> str:
    """Return the README with each marked table replaced by a fresh one."""
    tables = {item: summary(item) for item in ("dlg-reference", "accuracy")} | {"speed": speed()}
    for name, table in tables.items():
        mark = f"<!-- table: {name} -->"
        old = re.compile(re.escape(mark) + r"(\n\n?\|[^\n]*(\n\|[^\n]*)*)?")
        new = f"{mark}\n\n{table}"
        text = old.sub(lambda _, new=new: new, text)
    return text


if __name__ == "__main__":
    sys.exit(write_or_check({README: filled(README.read_text())}, __doc__))
