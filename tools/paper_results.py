"""Committed results: the rows of each item of the paper, and where they come from."""

import json
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from gradveil.auditing.settings import dumps
from gradveil_studies.paper.base import ITEMS, Item, Judgement

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


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


def markdown(rows: list[Row]) -> str:
    """Return rows as a Markdown table; a row may leave columns out."""
    if not rows:
        return "No line to show."
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(key, "")) for key in keys) + " |" for row in rows])


def cell(value: object) -> str:
    """Return a value as the text of a table's cell."""
    return str(value).replace("|", "\\|").replace("\n", " ")
