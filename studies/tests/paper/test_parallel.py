"""Units in worker processes: the same rows, kept as they come, and errors that are not lost."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gradveil.auditing.run_folder import RunFolder
from gradveil.errors import DataError
from gradveil_studies.cli import reproduce
from gradveil_studies.paper.base import Context, run_groups
from gradveil_studies.paper.table2 import Table2


def app() -> typer.Typer:
    """The command by itself."""
    found = typer.Typer()
    found.command()(reproduce.command)
    return found


def plain(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


@pytest.mark.slow
def test_worker_processes_give_the_same_rows_through_the_command(data_folder: Path, tmp_path: Path) -> None:
    stores = {}
    for jobs in ("1", "2"):
        words = ["table2", "--only", "dlg-*", "--data", str(data_folder), "--jobs", jobs]
        done = CliRunner().invoke(app(), [*words, "--out", str(tmp_path / jobs), "--json"])
        assert done.exit_code == 0, done.output
        rows = RunFolder.open(tmp_path / jobs / "table2").rows
        stores[jobs] = sorted(plain(list(rows)), key=lambda row: str(row["unit"]))
    assert {row["unit"] for row in stores["1"]} == {"dlg-mnist", "dlg-cifar10"}
    assert stores["1"] == stores["2"]


@pytest.mark.slow
def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(DataError, match="/nowhere"):
        list(run_groups(Table2(), [["dlg-mnist"], ["dlg-cifar10"]], Context("/nowhere"), jobs=2))
