"""`gradveil reproduce`: what it runs, in which order, and what it leaves alone."""

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from gradveil.cli import reproduce


def app() -> typer.Typer:
    """The command by itself."""
    found = typer.Typer()
    found.command()(reproduce.command)
    return found


def test_needed_items_come_first_and_once() -> None:
    assert [item.spec_name for item in reproduce.in_order(["claims", "bounds"])] == [
        "accuracy", "tradeoff", "claims", "convergence", "bounds",
    ]  # fmt: skip
    (first, *_) = reproduce.in_order(["tradeoff", "accuracy:seeds=1"])
    assert first.seeds == 1  # type: ignore[attr-defined]  # as it was asked for, not as it is needed


def test_with_only_what_is_needed_is_read_and_not_run(tmp_path: Path) -> None:
    words = ["claims", "--only", "nothing", "--data", str(tmp_path / "absent"), "--out", str(tmp_path)]
    done = CliRunner().invoke(app(), [*words, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["item"] == "claims"
    assert {v["status"] for v in result["verdicts"]} == {"not measured"}
    assert (tmp_path / "accuracy" / "summary.json").exists()


def test_an_unknown_scale_is_said_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["claims", "--scale", "huge", "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert "quick or full" in str(done.exception)
