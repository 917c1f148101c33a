"""``gradveil report``: the page of a run drawn again, or several runs compared."""

from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console

from gradveil.cli import shared


def command(
    folders: list[Path] = typer.Argument(..., help="The folder of an earlier run (its --out); several are compared."),
    out: Path = typer.Option(Path("comparison.html"), help="Where the page of a comparison goes."),
    json: shared.Json = False,
) -> None:
    """Draw report.html of a run folder again, or say what changed between the first run and the others."""
    if len(folders) == 1:
        from gradveil.report.page import write_report

        page = write_report(folders[0])
        shared.print_json({"report": str(page)}) if json else typer.echo(str(page))
        return
    from gradveil.report.compare import compare, comparison_table, write_comparison

    found = compare(folders)
    page = write_comparison(found, out)
    if json:
        shared.print_json({"page": str(page), **asdict(found)})
        return
    Console().print(comparison_table(found), highlight=False)
    typer.echo(f"Comparison: {page}")
