"""The audit's result in a terminal: one table, one sentence per defence."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from gradveil.experiments.summary import Floor, Line
from gradveil.experiments.verdict import BADGES, Verdict, short

HEAD = ("verdict", "naive server", "server that knows", "accuracy")
COLOURS = {"recovered": "bold red", "recognised": "red", "traces": "yellow", "nothing": "green", "void": "dim"}


def verdict_table(judged: Sequence[Verdict], floor: Floor | None) -> RenderableType:
    """Return the table of verdicts, with the blind guess as its last row, and the verdicts in words under it."""
    table = Table(Column("defence", overflow="fold"), *HEAD, box=None, pad_edge=False)
    for v in judged:
        accuracy = "–" if v.accuracy is None else f"{v.accuracy:.1%}"
        table.add_row(
            v.defense, Text(BADGES[v.outcome], COLOURS[v.outcome]), _cell(v.naive), _cell(v.adaptive), accuracy
        )
    if floor is not None:
        table.add_row(f"(blind guess: {floor.guess})", "the floor", f"MSE {short(floor.mse.mean)}", "", "", style="dim")
    words = [Text.assemble((f"{v.defense}: ", "bold"), v.text) for v in judged]
    return Group(table, Text(), *words)


def _cell(line: Line | None) -> str:
    if line is None:
        return "–"
    if not line.counts:
        return f"void ({line.attack})"
    hits = (
        f", {round(line.identified.mean * line.identified.count)}/{line.identified.count}"
        if line.identified.count
        else ""
    )
    server = "" if line.server in ("naive", line.attack) else f"{line.server} + "
    return f"MSE {short(line.mse.mean)}{hits} ({server}{line.attack})"
