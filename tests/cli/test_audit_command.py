"""The audit from the command line to the page."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradveil.experiments.run_folder import Store

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
    "--clients", "2", "--batch-size", "16", "--defense", "pruning:share=0.5", "--attack", "newton",
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


def start(folder: Path, out: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gradveil", "audit", *SMALL, "--out", out, *more]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_was_and_ends_like_an_unbroken_one(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(OWN)
    whole = start(tmp_path, "whole")
    assert whole.wait(timeout=300) == 0, whole.stderr
    rows = tmp_path / "part" / "rows.jsonl"

    killed = start(tmp_path, "part")
    wait_for(lambda: rows.exists() and "train/none" in rows.read_text(), killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left = Store.open(tmp_path / "part").rows
    unbroken = Store.open(tmp_path / "whole").rows
    assert 0 < len(left) < len(unbroken), "the run was over before it was killed"
    assert left == unbroken[: len(left)]
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "part" / "images").iterdir()}

    again = start(tmp_path, "part", "--resume")
    assert again.wait(timeout=300) == 0, again.stderr
    assert rows.read_bytes() == (tmp_path / "whole" / "rows.jsonl").read_bytes()
    done = {row["unit"] for row in left}
    kept = [p for p in (tmp_path / "part" / "images").iterdir() if p.name in times]
    assert len(done) >= 2
    assert all(p.stat().st_mtime_ns == times[p.name] for p in kept[: len(done)])  # nothing was done twice
    assert (tmp_path / "part" / "report.html").exists()


def test_a_run_that_is_interrupted_says_how_to_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.experiments.audit.run_chunk", interrupt)
    code, _, err = run("audit", *SMALL, "--out", "run", "--json")
    assert code == 130
    assert "continue with --resume --out run" in err
