"""Killed at any moment, every command goes on and ends as if nothing had happened: nothing twice, nothing missing."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from faults.conftest import LONG, Count, times
from faults.plays import COMMANDS
from faults.stage import LIMIT, Act, Outcome, Stage, one_line

pytestmark = pytest.mark.slow
KILLED = -signal.SIGKILL
QUICK = [name for name in COMMANDS if name not in ("train processes", "reproduce --jobs 2")]  # no worker processes
VOLATILE = {"seconds", "ratio", "step"}  # what was timed
NOBODY = 65534


Drills = Callable[[str], "Drill"]


@pytest.fixture(scope="module")
def drills(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    """The drill of a command, by name: its unbroken run is made once."""
    return cache(lambda name: Drill(stage, tmp_path_factory.mktemp("drill"), name))


class Drill:
    """A command, an unbroken run of it, and a folder in which others are broken off."""

    def __init__(self, stage: Stage, place: Path, name: str) -> None:
        self.stage, self.place, self.name = stage, place, name
        self.whole = place / "whole"
        (done,) = self.act(name, self.whole, fault="before")
        assert done.code == 0, done
        self.points, self.seconds = done.points, done.seconds

    def act(self, name: str, folder: Path, *more: str, **fault: Any) -> list[Outcome]:
        folder.mkdir(exist_ok=True)
        return self.stage.run(Act((*COMMANDS[name], "--out", "run", *more), str(folder), **fault))

    def broken(self, name: str = "", **fault: Any) -> Outcome:
        """Break a run off (by another command of that name), and see that it goes on to the same end."""
        folder = self.place / "broken"
        (cut,) = self.act(name or self.name, folder, **fault)
        said = f"{name or self.name}, {fault}: {cut}"
        assert not cut.alive, said
        (done,) = self.act(self.name, folder, "--resume")
        assert done.code == 0, f"{said}\n{done.err}"
        assert not done.alive, said
        assert contents(folder) == contents(self.whole), said
        shutil.rmtree(folder)
        return cut


def contents(folder: Path) -> dict[str, Any]:
    """Return every file by name with what must be the same in it."""
    return {str(path.relative_to(folder)): _content(path) for path in folder.rglob("*") if path.is_file()}


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        rows = [_steady(json.loads(line)) for line in path.read_text().splitlines()]
        return sorted(rows, key=lambda row: row["unit"]) if rows and "unit" in rows[0] else rows  # of several jobs
    if path.suffix == ".json":
        return _steady(json.loads(path.read_text()))
    if path.suffix == ".npz":
        with np.load(path) as file:
            return {name: file[name].tobytes() for name in file.files}
    if path.suffix == ".safetensors":  # whose metadata come in any order
        with safe_open(path, framework="np") as file:
            return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    return "" if path.suffix == ".html" else path.read_bytes()  # the page shows how long things took


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _steady(inner) for key, inner in value.items() if key not in VOLATILE}
    return [_steady(inner) for inner in value] if isinstance(value, list) else value


SOME = {  # in the short form: what is drilled, and at which of its writes
    "train sequential": [(fault, at) for fault in ("before", "after") for at in (1, 2, 4, 6, 7)]
    + [("torn", at) for at in (1, 6, 8, 17)],
    "train vectorised": [("after", 4)],
    "audit": [("before", 4), ("after", 5)],
    "reproduce": [("before", 1), ("torn", 8), ("after", 10)],
    "leaderboard": [("after", 3)],
}
WORKERS = {"train processes": "train sequential", "reproduce --jobs 2": "reproduce"}  # the same without workers


@pytest.mark.parametrize("name", SOME)
def test_killed_at_a_write(drills: Drills, name: str, count: Count) -> None:
    for fault, at in SOME[name]:
        assert drills(name).broken(fault=fault, at=at).code == KILLED, (fault, at)
        count(f"{name}: killed at a write")


@pytest.mark.parametrize("name", WORKERS)
def test_killed_while_its_workers_are_alive(drills: Drills, name: str, count: Count) -> None:
    assert drills(WORKERS[name]).broken(name, fault="after", at=4).code == KILLED
    count(f"{name}: killed at a write")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", COMMANDS if LONG else ["train sequential"])
def test_told_to_end(drills: Drills, name: str, number: signal.Signals, count: Count) -> None:
    drill = drills(name)
    for at in range(1, drill.points, times(4, 2)):
        cut = drill.broken(fault="after", at=at, number=number)
        assert cut.code == 128 + number, cut
        assert cut.err.splitlines()[-1].startswith("gradveil: stopped."), cut
        assert "Traceback" not in cut.err, cut
        count(f"{name}: told to end by {number.name}")


@pytest.mark.long
@pytest.mark.parametrize("fault", ["before", "after", "torn"])
@pytest.mark.parametrize("name", QUICK)
def test_killed_at_every_write(drills: Drills, name: str, fault: str, count: Count) -> None:
    drill, killed = drills(name), 0
    while (cut := drill.broken(fault=fault, at=killed + 1)).code == KILLED:
        killed += 1
        count(f"{name}: killed at a write")
    assert cut.code == 0
    assert killed == drill.points or (fault == "torn" and killed > drill.points)


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment(drills: Drills, name: str, count: Count) -> None:
    drill, moments = drills(name), random.Random(name)
    for _ in range(12 if name in QUICK else 8):
        cut = drill.broken(after=moments.uniform(0.0, drill.seconds))
        assert cut.code in (KILLED, 0), cut
        count(f"{name}: killed at a random moment", cut.code == KILLED)


@pytest.mark.parametrize("name", COMMANDS if LONG else ["train sequential"])
def test_a_disk_that_fills_up(drills: Drills, name: str, count: Count) -> None:
    drill = drills(name)
    step = times(6, 1 if name in QUICK else 7)
    faults = [{"fault": "full", "at": at} for at in range(1, 2 * drill.points + 1, step)]
    for fault in [*faults, {"fault": "large", "at": 100}]:
        cut = drill.broken(**fault)
        assert cut.code == 2, cut
        assert one_line(cut), cut
        count(f"{name}: no space, or no room for a file")


FILL = """
mount -t tmpfs -o size=24k none "$1" && cd "$1" || exit 77
$2 -m gradveil {words} --out run; echo "code $?"
mount -o remount,size=10m "$1"
$2 -m gradveil {words} --out run --resume || exit 1
cp -r run "$3"
"""


@pytest.mark.long
def test_a_small_disk(drills: Drills, tmp_path: Path, count: Count) -> None:
    drill = drills("train sequential")
    script = FILL.format(words=" ".join(COMMANDS[drill.name]))
    (tmp_path / "disk").mkdir()
    (tmp_path / "kept").mkdir()
    words = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path / "disk"), sys.executable, str(tmp_path / "kept")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("needs the right to mount a disk")
    assert done.returncode == 0, done
    assert "code 2" in done.stdout, done
    assert "gradveil: No space left for run/" in done.stderr, done
    assert contents(tmp_path / "kept") == contents(drill.whole)
    count("train sequential: a disk of 24 KiB")


@pytest.mark.parametrize("name", QUICK if LONG else ["train sequential"])
@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to become another user")
def test_a_folder_that_others_own(stage: Stage, name: str, count: Count) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (refused,) = stage.run(Act((*COMMANDS[name], "--out", "run"), place, user=NOBODY))
        assert refused.code == 2, refused
        assert one_line(refused), refused
        assert "Permission denied" in refused.err
        assert not list(Path(place).iterdir())
    count(f"{name}: a folder that cannot be written")


@pytest.mark.parametrize("name", QUICK if LONG else ["train sequential"])
def test_two_at_once(drills: Drills, tmp_path: Path, name: str, count: Count) -> None:
    for number in range(times(2, 10)):
        folder = tmp_path / str(number)
        folder.mkdir()
        act = Act((*COMMANDS[name], "--out", "run", "--resume"), str(folder))
        both = drills(name).stage.run(act, act)
        won = [outcome for outcome in both if outcome.code == 0]
        assert won, both
        for lost in (outcome for outcome in both if outcome.code):
            assert lost.code == 2, lost
            assert f"Another process (pid {won[0].pid} on" in lost.err, lost
            assert one_line(lost), lost
            count(f"{name}: refused while another was at work")
        assert contents(folder) == contents(drills(name).whole)
