"""Committed results: the rows of each item of the paper and of the leaderboard, and where they come from.

    python tools/results.py runs/reproduce/table1 --machine "one NVIDIA H200, 16 cores" --commit 745123a

brings finished runs of `gradveil reproduce` or `gradveil leaderboard` there: rows, figure, command, machine, commit.
Several folders of one item are merged by unit of work; a unit that is there already is replaced by the new one.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from gradveil.auditing.run_folder import VERSIONS, RunFolder, dumps
from gradveil.seeds import Seeds
from gradveil_studies.leaderboard.board import Leaderboard
from gradveil_studies.leaderboard.entries import PANELS
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
BENCH = ROOT / "studies" / "bench" / "results"
BOARD = "leaderboard"


def own_rows(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the committed rows of an item; none where it has not been run."""
    path = folder / name / "rows.jsonl"
    return list(_read(path, path.stat().st_mtime_ns)) if path.exists() else []


@lru_cache(maxsize=32)
def _read(path: Path, _changed: int) -> tuple[Row, ...]:
    return tuple(json.loads(line) for line in path.read_text().splitlines())


def all_rows(item: Item, folder: Path = RESULTS) -> list[Row]:
    """Return an item's rows, then those of the items it needs, marked with their names."""
    needed = [row | {"item": name} for name in item.needs for row in own_rows(name, folder)]
    return own_rows(item.spec_name, folder) + needed


def judged(item: Item, folder: Path = RESULTS) -> tuple[Judgement, ...]:
    """Return an item's verdicts from the rows as they are now."""
    paths = [folder / name / "rows.jsonl" for name in (item.spec_name, *item.needs)]
    return _judged(item, folder, tuple(path.stat().st_mtime_ns for path in paths if path.exists()))


@lru_cache(maxsize=32)
def _judged(item: Item, folder: Path, _changed: tuple[int, ...]) -> tuple[Judgement, ...]:
    return tuple(item.verdicts(all_rows(item, folder)))


def runs(name: str, folder: Path = RESULTS) -> list[Row]:
    """Return the runs that an item's rows come from: command, seed, date, machine and units."""
    path = folder / name / "run.toml"
    return tomllib.loads(path.read_text())["run"] if path.exists() else []


def write_runs(name: str, entries: list[Row], folder: Path = RESULTS) -> None:
    """Write ``run.toml``."""
    text = "".join(f"[[run]]\n{dumps(entry)}\n" for entry in entries)
    (folder / name / "run.toml").write_text(text.rstrip("\n") + "\n")


def build(name: str, folder: Path = RESULTS) -> Item:
    """Return the item with the settings that its rows were made with."""
    specs = sorted({run["item"] for run in runs(name, folder)}) or [name]
    items = [ITEMS.build(spec) for spec in specs]
    if any(item != items[0] for item in items):
        raise SystemExit(f"The rows of {name} were made with different settings: {', '.join(specs)}.")
    return items[0]


def promise_rows() -> list[Row]:
    """Return the rows that `promises.py` priced and `promise_attacks.py` attacked (studies/bench)."""
    priced, sought = (
        json.loads((BENCH / name).read_text())["rows"] for name in ("promises.json", "promise-attacks.json")
    )
    found = [row | {"dataset": _named(row)} for row in sought]
    for row in priced:
        about = {"kind": "training", "dataset": _named(row), "split": "paper"}
        about |= {"defense": row["defense"], "multiple": 1, "lr": row["choice"][0], "held_out": 0.0}
        found += [about | {"seed": seed, "accuracy": accuracy} for seed, accuracy in enumerate(row["accuracy"])]
    return found


def _named(row: Row) -> str:
    many = ", 1,000 devices" if row["devices"] == 1000 else ""
    return f"{row['dataset']}, {row['model'].partition(':')[0]}{many}"


def keep(folder: Path, machine: str, commit: str, into: Path = RESULTS, later: Sequence[Path] = ()) -> str:
    """Merge one run folder, made by the code of a commit, into the committed results; return the item's name.

    What the folders of ``later`` hold of the same item goes as well: they are about to be kept.
    """
    store = RunFolder.open(folder)
    config, versions = tomllib.loads(store.config), tomllib.loads((folder / VERSIONS).read_text())
    if "item" not in config:
        return keep_board(store, config, versions, (machine, commit), into)
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
    _write_rows(name, [r for r in own_rows(name, into) if r["unit"] not in gone] + list(store.rows), place, into)
    entry = {"item": config["item"], "command": command(config), "scale": config["scale"], "seed": config["seed"]}
    entry |= {"device": config["device"]} | _made(versions, machine, commit)
    write_runs(name, _joined([*old, entry | {"units": units}]), into)
    return name


def keep_board(store: RunFolder, config: Row, versions: Row, made: tuple[str, str], into: Path) -> str:
    """Merge a run folder of the leaderboard into the committed rows."""
    units = list(dict.fromkeys(row["unit"] for row in store.rows))
    if not units:
        raise SystemExit(f"{store.path} holds no finished unit of work.")
    (into / BOARD).mkdir(parents=True, exist_ok=True)
    every = (unit for scale in PANELS for unit in Leaderboard().units(Context(scale=scale)))
    place = {unit: i for i, unit in enumerate(dict.fromkeys(every))}
    _write_rows(BOARD, [r for r in own_rows(BOARD, into) if r["unit"] not in units] + list(store.rows), place, into)
    device = f" --device {config['device']}" if config["device"] != "cpu" else ""
    entry = {"command": f"gradveil leaderboard --scale {config['scale']} --seed {config['seed']}{device}"}
    entry |= {"scale": config["scale"], "seed": config["seed"]} | _made(versions, *made)
    write_runs(BOARD, [*_without(runs(BOARD, into), units), entry | {"units": units}], into)
    return BOARD


def _write_rows(name: str, rows: list[Row], place: dict[str, int], into: Path) -> None:
    rows = sorted(rows, key=lambda row: place.get(row["unit"], len(place)))
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (into / name / "rows.jsonl").write_text(text)


def _made(versions: Row, machine: str, commit: str) -> Row:
    date = versions.pop("date")[:10]
    named = [f"{package} {number}" for package, number in versions.items()]
    return {"date": date, "machine": machine, "commit": commit, "versions": named}


def command(config: Row) -> str:
    """Return the command that makes these rows."""
    device = f" --device {config['device']}" if config["device"] != "cpu" else ""
    return f"gradveil reproduce {config['item']} --scale {config['scale']} --seed {config['seed']}{device}"


def draw(name: str, into: Path = RESULTS) -> bool:
    """Draw a figure from all of its rows."""
    if name == BOARD:
        return Leaderboard().draw(own_rows(name, into) + promise_rows(), into / name / name)
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
