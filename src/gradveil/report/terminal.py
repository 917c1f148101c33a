"""The audit's result in a terminal: one table, one sentence per defence."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradveil.experiments.summary import NAIVE, Floor, Line
from gradveil.experiments.verdict import BADGES, Verdict, short

HEAD = ("defence", "verdict", "naive server", "server that knows", "accuracy")
COLOURS = {"recovered": "bold red", "recognised": "red", "traces": "yellow", "nothing": "green", "void": "dim"}


def verdict_table(judged: Sequence[Verdict], floor: Floor | None) -> RenderableType:
    """Return the table of verdicts, with the blind guess as its last row, and the verdicts in words under it."""
    table = Table(*HEAD, box=None, pad_edge=False)
    for v in judged:
        badge = Text(BADGES[v.outcome], COLOURS[v.outcome])
        accuracy = "–" if v.accuracy is None else f"{v.accuracy:.1%}"
        table.add_row(_spec(v.defense), badge, _cell(v.naive), _cell(v.adaptive), accuracy)
    if floor is not None:
        guess = Text(f"blind guess\n  {floor.guess}")
        table.add_row(guess, "the floor", f"MSE {short(floor.mse.mean)}", "", "", style="dim")
    words = [Text.assemble((f"{v.defense}: ", "bold"), v.text) for v in judged]
    return Group(table, Text(), *words)


def _spec(defense: str) -> Text:
    """Return a spec over two lines: the name, then its settings."""
    return Text(defense.replace(":", "\n  ", 1), overflow="fold")


def _cell(line: Line | None) -> Text:
    if line is None:
        return Text("–")
    attack = line.attack.partition(":")[0]
    by = attack if line.server in (NAIVE, attack) else f"{line.server} + {attack}"
    if not line.counts:
        return Text(f"void\n{by}")
    got = f"MSE {short(line.mse.mean)}"
    if line.identified.count:
        got += f", {round(line.identified.mean * line.identified.count)}/{line.identified.count}"
    return Text(f"{got}\n{by}")
