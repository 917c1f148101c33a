"""`gradveil reproduce`: what it runs, in which order, and what it leaves alone."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import typer
from typer.testing import CliRunner

from gradveil.cli.shared import Display
from gradveil.errors import SpecError
from gradveil_studies.cli import reproduce
from gradveil_studies.paper import base
from gradveil_studies.paper.base import Context, Item, Judgement, Row


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
    (result,) = json.loads(done.stdout)
    assert result["item"] == "claims"
    assert {v["status"] for v in result["verdicts"]} == {"not measured"}
    assert (tmp_path / "accuracy" / "summary.json").exists()


def test_a_pattern_that_fits_nothing_is_said_before_anything_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["meter", "--only", "nomatch*", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, SpecError)
    assert "--only 'nomatch*' fits no unit of work. There are:" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_an_unknown_scale_is_said_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(app(), ["claims", "--scale", "huge", "--out", str(tmp_path)])
    assert done.exit_code != 0
    assert "quick or full" in str(done.exception)


@dataclass(frozen=True)
class Toy(Item):
    """Three units that say their names."""

    spec_name: ClassVar[str] = "toy"
    title: ClassVar[str] = "Toy"

    def work(self, context: Context) -> dict[str, None]:
        """Return three."""
        return dict.fromkeys("abc")

    def run(self, unit: str, context: Context) -> list[Row]:
        """Say the name."""
        return [{"name": unit}]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return the names."""
        return [{"name": row["name"]} for row in rows]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Return none."""
        return []


def test_tables_are_in_order_however_the_processes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last_first = lambda item, groups, context, jobs: reversed([(item.run_group(g, context), 0.0) for g in groups])  # noqa: E731
    monkeypatch.setattr(base, "run_groups", last_first)
    made: dict[str, list[Row]] = {}
    result = reproduce.run_item(Toy(), Context(), tmp_path, False, "*", made, Display(quiet=True), 3)
    assert [row["name"] for row in result["table"]] == ["a", "b", "c"]
    assert [row["unit"] for row in made["toy"]] == ["a", "b", "c"]


def test_jobs_are_the_cores_unless_there_are_many_or_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, jobs in ((1, 1), (2, 2), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: set(range(n)), raising=False)
        assert base.usual_jobs(Context()) == jobs
    assert base.usual_jobs(Context(device=torch.device("cuda"))) == 1
