"""``gradveil report``: draw the page of a run folder again."""

from pathlib import Path

import typer


def command(folder: Path = typer.Argument(..., help="The folder of an earlier run (its --out).")) -> None:
    """Draw report.html of a run folder from its rows and images."""
    from gradveil.report.page import write_report

    typer.echo(str(write_report(folder)))
