"""Bring finished runs of `gradveil reproduce` into docs/results: rows, figure, and where they come from.

    python tools/keep_results.py runs/reproduce/table1 --machine "one NVIDIA H200, 16 cores" --commit 745123a

Several folders of one item are merged by unit of work; a unit that is there already is replaced by the new one.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from paper_results import RESULTS, ROOT, Row, all_rows, build, own_rows, runs, write_runs

from gradveil.auditing.run_folder import VERSIONS, RunFolder
from gradveil.seeds import Seeds
from gradveil_studies.paper.base import ITEMS, Context, Item


def keep(folder: Path, machine: str, commit: str, into: Path = RESULTS, later: Sequence[Path] = ()) -> str:
    """Merge one run folder, made by the code of a commit, into the committed results; return the item's name.

    What the folders of ``later`` hold of the same item goes as well: they are about to be kept.
    """
    store = RunFolder.open(folder)
    config, versions = tomllib.loads(store.config), tomllib.loads((folder / VERSIONS).read_text())
    if config["scale"] != "full":
        raise SystemExit(f"{folder} was run at --scale {config['scale']}; only full results are kept.")
    item = ITEMS.build(config["item"])
    name = item.spec_name
    (into / name).mkdir(parents=True, exist_ok=True)
    if not _order(item):
        return name  # reads other items' rows only: there is a figure to draw, no row to keep
    if not store.rows:
        raise SystemExit(f"{folder} holds no finished unit of work.")
    units = list(dict.fromkeys(row["unit"] for row in store.rows))
    gone = {*units, *(unit for path in later for unit in _units(path, item))}
    old = _without(runs(name, into), gone)
    if other := next((run["item"] for run in old if ITEMS.build(run["item"]) != item), None):
        raise SystemExit(f"{folder} was run as {config['item']}, the results that are there as {other}.")
    place = _order(item)
    merged = [r for r in own_rows(name, into) if r["unit"] not in gone] + list(store.rows)
    merged.sort(key=lambda row: place.get(row["unit"], len(place)))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in merged)
    (into / name / "rows.jsonl").write_text(text)
    date = versions.pop("date")[:10]
    entry = {"item": config["item"], "command": command(config), "scale": config["scale"], "seed": config["seed"]}
    entry |= {"device": config["device"], "date": date, "machine": machine, "commit": commit}
    entry |= {"versions": [f"{package} {number}" for package, number in versions.items()], "units": units}
    write_runs(name, _joined([*old, entry]), into)
    return name


def command(config: Row) -> str:
    """Return the command that makes these rows."""
    device = f" --device {config['device']}" if config["device"] != "cpu" else ""
    return f"gradveil reproduce {config['item']} --scale {config['scale']} --seed {config['seed']}{device}"


def draw(name: str, into: Path = RESULTS) -> bool:
    """Draw an item's figure from all of its rows."""
    item = build(name, into)
    return item.draw(all_rows(item, into), into / name / name)


def _order(item: Item) -> dict[str, int]:
    """Return the place of each unit of a full run."""
    return {unit: i for i, unit in enumerate(item.units(Context(None, torch.device("cpu"), "full", Seeds(0))))}


def _units(folder: Path, item: Item) -> set[str]:
    """Return the units of a run folder, if it is of this item with these settings."""
    store = RunFolder.open(folder)
    same = ITEMS.build(tomllib.loads(store.config)["item"]) == item
    return {row["unit"] for row in store.rows} if same else set()


def _without(old: list[Row], units: Collection[str]) -> list[Row]:
    """Return the earlier runs less the units that were done anew."""
    left = [run | {"units": [unit for unit in run["units"] if unit not in units]} for run in old]
    return [run for run in left if run["units"]]


def _joined(entries: list[Row]) -> list[Row]:
    """Return the runs, those that differ in their units alone as one."""
    found: list[Row] = []
    for entry in entries:
        same = next((e for e in found if e | {"units": ()} == entry | {"units": ()}), None)
        if same is None:
            found.append(entry)
        else:
            same["units"] = [*same["units"], *entry["units"]]
    return found


def commit_named(name: str) -> str:
    """Return a commit of this repository in its short form."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "--verify", "--quiet", f"{name}^{{commit}}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not found:
        raise SystemExit(f"{name} is no commit of this repository; give the one that the runs were made with.")
    return found


def main() -> int:
    """Keep every folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--machine", required=True, help="The kind of machine, in words.")
    parser.add_argument("--commit", required=True, help="The commit whose code made the runs.")
    given = parser.parse_args()
    made = given.machine, commit_named(given.commit)
    names = [keep(folder, *made, later=given.folders[i:]) for i, folder in enumerate(given.folders, 1)]
    needing = [name for name, cls in ITEMS if own_rows(name) and set(cls.needs) & set(names)]
    for name in dict.fromkeys([*names, *needing]):
        drawn = draw(name)
        if not any((RESULTS / name).iterdir()):
            (RESULTS / name).rmdir()
        print(f"docs/results/{name}: {len(own_rows(name))} rows" + (", figure drawn" if drawn else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
