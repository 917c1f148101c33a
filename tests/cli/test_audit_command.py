"""The audit from the command line to the page."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gradveil import pace
from gradveil.auditing.run_folder import Row, RunFolder

OWN = """
import numpy as np
from torch import nn

def make_model(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))

def make_data():
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = 0.3 * rng.random((90, 1, 6, 6)) + 0.3 * labels[:, None, None, None]
    return images.astype(np.float32), labels
"""
SMALL = (
    "--model", "my_module:make_model", "--dataset", "my_module:make_data", "--rounds", "2", "--images", "2",
    "--clients", "2", "--batch-size", "16", "--defense", "pruning:share=0.5", "--attack", "analytic",
)  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "my_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)  # another test's
    return command


def test_from_the_command_line_to_the_page(run: Run, tmp_path: Path) -> None:
    code, out, err = run("audit", *SMALL, "--out", "run")
    assert code == 0, err
    for said in ("none", "pruning:share=0.5", "blind guess", "Images recovered", "Report: run"):
        assert said in out
    folder = tmp_path / "run"
    assert {p.name for p in folder.iterdir()} == {"config.toml", "versions.toml", "rows.jsonl", "images", "report.html"}
    assert "What these updates give away" in (folder / "report.html").read_text()

    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    code, out, _ = run("report", "run")
    assert code == 0
    assert out.strip().endswith("report.html")
    assert (folder / "report.html").read_text() == page


def test_json_is_for_programs_and_settings_from_a_file_give_the_same_run(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("audit", *SMALL, "--out", "one", "--json")
    assert code == 0
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {v["defense"] for v in found["verdicts"]} == {"none", "pruning:share=0.5"}
    assert found["lines"]
    assert found["headline"]

    code, _, err = run("audit", "--config", "one/config.toml", "--out", "two", "--json")
    assert code == 0, err
    assert (tmp_path / "one" / "rows.jsonl").read_bytes() == (tmp_path / "two" / "rows.jsonl").read_bytes()


# Runs the command line and kills it right after a file was put in its place: the rows of the first training, or the
# images of the unit that comes next, whose rows are then still missing.
KILLED = """
import os, signal, sys
from pathlib import Path
from gradveil.cli.main import entry
when, put, trained = sys.argv.pop(1), os.replace, False

def replace(source, target, **kwargs):
    global trained
    put(source, target, **kwargs)
    target = Path(target)
    if target.name == "rows.jsonl" and '"train/none"' in target.read_text():
        trained = True
    if trained and target.match({"rows": "rows.jsonl", "images": "images/*"}[when]):
        os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
entry()
"""


def audit(folder: Path, out: str, *more: str, killed: str | None = None) -> int:
    run = ["-c", KILLED, killed] if killed else ["-m", "gradveil"]
    command = [sys.executable, *run, "audit", *SMALL, "--out", out, *more]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, timeout=500, check=False
    )
    return done.returncode


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Row, ...]:
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "my_module.py").write_text(OWN)
    assert audit(folder, "whole") == 0
    return RunFolder.open(folder / "whole").rows


@pytest.mark.slow
@pytest.mark.parametrize("when", ["rows", "images"])
def test_a_killed_run_goes_on_where_it_was_and_ends_like_an_unbroken_one(
    tmp_path: Path, unbroken: tuple[Row, ...], when: str
) -> None:
    (tmp_path / "my_module.py").write_text(OWN)
    assert audit(tmp_path, "part", killed=when) == -signal.SIGKILL
    left = RunFolder.open(tmp_path / "part").rows
    assert 0 < len(left) < len(unbroken)
    assert_same(left, unbroken[: len(left)])
    images = tmp_path / "part" / "images"
    times = {path.name: path.stat().st_mtime_ns for path in images.iterdir()}

    assert audit(tmp_path, "part", "--resume") == 0
    again = RunFolder.open(tmp_path / "part")
    assert_same(again.rows, unbroken)
    finished = {again._image_file(row["unit"]).name for row in left} & times.keys()
    assert len(finished) >= 2
    assert len(times) - len(finished) == (when == "images")  # what has no rows yet is done again, nothing else is
    assert all((images / name).stat().st_mtime_ns == times[name] for name in finished)
    assert (tmp_path / "part" / "report.html").exists()


def assert_same(rows: Sequence[Row], others: Sequence[Row]) -> None:
    """Two processes may differ in a sum's last digits, which hang on where memory lies."""
    for mine, other in zip(rows, others, strict=True):
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert other[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key


def test_a_run_that_is_interrupted_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.auditing.work.run", interrupt)
    code, _, err = run("audit", *SMALL, "--out", "run", "--json")
    assert code == 130
    assert "continue with --resume --out run" in err


def test_without_a_limit_the_plan_comes_first(run: Run) -> None:
    code, _, err = run("audit", *SMALL, "--no-meter", "--out", "run")
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0] == "plan: 2 rounds of training under 2 defences"
    assert lines[1] == "plan: all attacks on 2 clients to their end; --minutes sets a limit"
    assert "first pictures: run/report.html" in lines


def test_five_seconds_are_one_line_that_says_so(run: Run, tmp_path: Path) -> None:
    code, _, err = run("audit", *SMALL, "--minutes", "0.083", "--out", "run")
    assert code == 2
    assert err == "gradveil: minutes=0.083: in 5 seconds no audit is set up. Give at least 0.1.\n"
    assert not (tmp_path / "run").exists()


def test_a_limit_that_setting_up_takes_whole_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.pace.seconds_of", lambda minutes: -1.0 if minutes else float("inf"))
    code, _, err = run("audit", *SMALL, "--minutes", "2", "--out", "run")
    assert code == 2
    assert "Setting up took" in err
    assert err.count("\n") == 1


def test_what_was_imported_before_the_command_ran_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.cli.watchdog._began", pace.clock() - 300)
    code, _, err = run("audit", *SMALL, "--minutes", "2", "--out", "run")
    assert code == 2
    assert "Setting up took" in err


@pytest.mark.parametrize("minutes", ["0", "-3", "nan"])
def test_minutes_below_zero_are_refused(run: Run, tmp_path: Path, minutes: str) -> None:
    code, _, err = run("audit", *SMALL, "--minutes", minutes, "--out", "run")
    assert code == 2
    assert err == f"gradveil: minutes={float(minutes)}: give a number above 0.\n"
    assert not (tmp_path / "run").exists()


SCHEDULE = (
    "--examples", "2", "--epochs", "2", "--batch-size", "1", "--momentum", "0.5", "--weight-decay", "0.1",
    "--clip", "5",
)  # fmt: skip


def test_the_attacked_client_trains_as_the_settings_say(run: Run, tmp_path: Path) -> None:
    small = ["surrogate:steps=5" if word == "analytic" else word for word in SMALL]
    code, out, err = run("audit", *small, *SCHEDULE, "--no-meter", "--out", "run", "--json")
    assert code == 0, err
    client = json.loads(out)["client"]
    assert (client["examples"], client["steps"], client["batch_size"], client["momentum"]) == (2, 4, 1, 0.5)
    said = "4 local steps on 2 examples, batches of 1 (sgd, momentum 0.5, weight decay 0.1, clip 5, learning rate 0.3)"
    assert client["schedule"] == said
    assert said in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--optimizer", "adma"), "optimizer=adma: Did you mean 'adam'? Else give one of sgd, adam, adamw."),
        (("--optimizer", "adam", "--momentum", "0.9"), "momentum=0.9 belongs to sgd"),
        (("--momentum", "-1"), "momentum=-1.0"),
        (("--clip", "-1"), "clip=-1.0"),
        (("--proximal", "nan"), "proximal=nan"),
    ],
)
def test_local_steps_that_make_no_sense_are_one_line(run: Run, options: tuple[str, ...], said: str) -> None:
    for command in ("audit", "train"):
        code, _, err = run(command, *options, "--out", "run")
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
