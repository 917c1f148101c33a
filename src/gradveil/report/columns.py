"""A table's columns one by one: what the blind guess and the strongest attack on each defence get of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from gradveil.auditing.run_folder import RunFolder
from gradveil.metrics.recovery import rate, short
from gradveil.modalities import Cell, Modality
from gradveil.report.pictures import KEY, TRUTH
from gradveil.threats.rows import Line, MeasuredExample, best_floor, group, modality_of, read
from gradveil.threats.verdict import oblivious_and_adaptive


@dataclass(frozen=True)
class ColumnTable:
    """The table: a line for each column of the data."""

    round: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


def column_table(store: RunFolder, found: Sequence[Line]) -> ColumnTable | None:
    """Return the table of the first round looked at; nothing where examples have no columns, or no truth."""
    kind, floor, truth = modality_of(store.rows), best_floor(store.rows), store.arrays(TRUTH)
    if not kind.heads or floor is None or "truth" not in truth or not found:
        return None
    here = [line for line in found if line.round == found[0].round]
    by_line = group([m for m in read(store.rows, "attack") if m.round == found[0].round], *KEY)
    guessed = [m for m in read(store.rows, "floor") if m.guess == floor.guess]
    shown = {f"blind guess: {floor.guess}": _cells(kind, truth["truth"], guessed, [truth[floor.guess]] * len(guessed))}
    for defense in dict.fromkeys(line.defense for line in here):
        oblivious, adaptive = oblivious_and_adaptive(here, defense)
        line = adaptive or oblivious
        if line is not None:
            mine = by_line[line.key]
            arrays = [store.arrays(m.unit)["found"] for m in mine]
            shown[f"{defense} ({line.attack.partition(':')[0]})"] = _cells(kind, truth["truth"], mine, arrays)
    rows = [(name, [_said([row[c] for row in its]) for its in shown.values()]) for c, name in enumerate(kind.heads)]
    return ColumnTable(found[0].round, list(shown), rows)


def _cells(
    kind: Modality, truth: NDArray[Any], mine: Sequence[MeasuredExample], arrays: Sequence[NDArray[Any]]
) -> list[list[Cell]]:
    """Return the cells of each example found; a guess lies in the place of its example, an attack's in its own."""
    places = [m.index if m.attack else m.example for m in mine]
    pairs = [(x[place], truth[m.example]) for m, x, place in zip(mine, arrays, places, strict=True)]
    return [kind.cells(torch.from_numpy(x), torch.from_numpy(true)) or [] for x, true in pairs]


def _said(cells: Sequence[Cell]) -> str:
    off = [cell.off for cell in cells if cell.off is not None]
    said = rate([float(bool(cell.right)) for cell in cells]).as_count
    return f"{said} ±{short(sum(off) / len(off))}" if off else said
