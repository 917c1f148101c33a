"""A comparison of runs, drawn: a page, and a table for the terminal."""

from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradveil.files import write_atomically
from gradveil.report.compare import ComparedCell, Comparison
from gradveil.report.page import fill
from gradveil.report.plain import name_of
from gradveil.report.table import COLOURS


def write_comparison(found: Comparison, path: Path) -> Path:
    """Draw the page, and return where it is."""
    write_atomically(path, fill("compare.html", {"found": found}).encode())
    return path


def comparison_table(found: Comparison) -> RenderableType:
    """Return what changed in sentences; under it, the verdicts that more than one run has, and the settings."""
    table = Table("defence, server", *found.names, box=None, pad_edge=False)
    before = ""
    for line in found.lines:
        if not line.shared:
            continue
        if line.spec != before:
            table.add_row(Text(name_of(line.spec), "bold"))
            before = line.spec
        first, *others = line.cells
        table.add_row(f"  {line.who}", _told(first), *(Text("the same") if x == first else _told(x) for x in others))
    parts: list[RenderableType] = [*map(Text, found.said), Text(), table]
    if found.settings:
        settings = Table("setting", *found.names, box=None, pad_edge=False)
        for key, values in found.settings:
            settings.add_row(key, *values)
        parts += [Text(), settings]
    return Group(*parts)


def _told(cell: ComparedCell) -> Text:
    text = Text(cell.badge, COLOURS.get(cell.outcome, ""))
    for more in (cell.figure, cell.change):
        text.append(f"\n{more}" if more else "", "dim")
    return text
