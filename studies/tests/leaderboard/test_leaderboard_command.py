"""`gradveil leaderboard`, from the command line to the table, the figure and an error that shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradveil.errors import SpecError
from gradveil_studies.cli import leaderboard
from gradveil_studies.leaderboard import board
from gradveil_studies.leaderboard.entries import Panel

GAUSSIAN = "gaussian:scale=0.001"


def run(*words: str) -> Any:
    app = typer.Typer()
    app.command()(leaderboard.command)
    return CliRunner().invoke(app, [*words, "--jobs", "1"])


def test_a_run_that_was_killed_goes_on_and_ends_in_a_table(
    tiny: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--defense", GAUSSIAN, "--out", str(tmp_path / "run")]
    real, asked = board.attacked, []

    def killed(entries: Any, place: Any) -> Any:
        if asked:
            raise KeyboardInterrupt
        asked.extend(entries)
        return real(entries, place)

    monkeypatch.setattr(board, "attacked", killed)
    stopped = run(*words)
    assert stopped.exit_code == 130
    assert "continue with" in stopped.stderr
    done = (tmp_path / "run" / "rows.jsonl").read_text()
    assert '"attack/digits/none"' in done
    assert f'"attack/digits/{GAUSSIAN}"' not in done

    asked.clear()
    ended = run(*words, "--resume", "--json")
    assert ended.exit_code == 0, ended.output
    assert [entry.spec for entry in asked] == [GAUSSIAN]  # nothing is done twice
    assert (tmp_path / "run" / "rows.jsonl").read_text().startswith(done)
    result = json.loads(ended.stdout)
    table = {row["defence"]: row for row in result["table"]}
    assert list(table) == ["none", GAUSSIAN, "none (batches of 32)"]
    assert {"accuracy, paper", "accuracy, iid", "points below, paper", "worst record", "picked of 100", "step"} <= set(
        table[GAUSSIAN]
    )
    assert table["none"]["points below, paper"] == "+0.0"
    assert table[GAUSSIAN]["μ"] == "none"  # it promises nothing
    tiers = {row["defence"]: row for row in result["tiers"]}
    assert set(tiers[GAUSSIAN]) == {"data", "defence", "oblivious", "adaptive", "informed", "multi-round", "malicious"}
    assert all("not run" not in tiers[GAUSSIAN][tier] for tier in ("oblivious", "adaptive", "informed", "multi-round"))
    assert result["figure"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    whole = {
        row["rounds"] for row in rows if row.get("tier") in ("multi-round", "informed") and row["defense"] == GAUSSIAN
    }
    (client,) = [row for row in rows if row["kind"] == "client" and row["defense"] == GAUSSIAN]
    assert whole == {client["participations"]}  # the whole run, not a round
    assert client["participations"] > 1
    assert client["records"] == tiny.records


def test_a_promise_is_held_against_every_attack_and_a_beaten_one_ends_in_an_error(
    tiny: Panel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = "veil:z=2,clip=1"
    words = ["--defense", spec, "--out", str(tmp_path / "run"), "--only", "[fa]*"]
    ended = run(*words, "--json")
    assert ended.exit_code == 0, ended.output
    (row,) = [row for row in json.loads(ended.stdout)["table"] if row["defence"] == spec]
    assert float(row["μ"].partition(" ")[0]) > 0.5
    assert 0 < float(row["floor for Gaussian images"]) < 1
    assert row["accuracy, paper"] == "not run" if "accuracy, paper" in row else True
    monkeypatch.setattr("gradveil_studies.leaderboard.standings.Account.guess", lambda self, kappa: 1e-12)
    monkeypatch.setattr("gradveil_studies.leaderboard.standings.SIGNIFICANT", 1.1)
    beaten = run(*words, "--resume")
    assert beaten.exit_code == 1
    assert f"error: {spec} on digits" in beaten.output.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scale", "huge"], "quick or full"),
        (["--defense", "nothing:x=1"], "nothing"),
        (["--only", "nomatch*"], "fits no unit of work"),
    ],
)
def test_bad_words_are_one_line_and_nothing_is_written(words: list[str], said: str, tmp_path: Path) -> None:
    done = run(*words, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, SpecError)
    assert said in str(done.exception)
    assert not (tmp_path / "out").exists()
