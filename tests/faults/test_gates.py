"""A gate passes after a finished report that says so, and never else (a gate that passes when nothing ran)."""

import random
import signal
import time
from pathlib import Path

import pytest

from faults.conftest import Count, times
from faults.plays import COMMANDS, SMALL
from faults.stage import Act, Outcome, Stage, one_line

pytestmark = pytest.mark.slow
OWN = """
import ctypes, os, signal, sys, threading, time
import numpy as np
import torch
from torch import nn

def strike():
    {strike}

{on_import}

class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.rest = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        {in_forward}
        return self.rest(x)

def make(input_shape, num_classes):
    {in_make}
    return Model(num_classes)

def loss(output, target):
    {in_loss}
    return nn.functional.cross_entropy(output, target)

def data():
    {in_data}
    return np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 4
"""
PLACES = ("on_import", "in_make", "in_forward", "in_loss", "in_data")
ENDS = {
    "sys.exit(0)": "sys.exit(0)",
    "sys.exit()": "sys.exit()",
    "raise SystemExit(0)": "raise SystemExit(0)",
    "os._exit(0)": "os._exit(0)",
    "os._exit(3)": "os._exit(3)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "told to end": "os.kill(os.getpid(), signal.SIGTERM)",
    "aborted": "os.abort()",
    "a crash": "ctypes.string_at(0)",
    "interrupted": "raise KeyboardInterrupt",
    "out of memory": "raise MemoryError",
    "an end of its own": "raise type('Odd', (BaseException,), {})('odd')",
    "a generator's end": "raise GeneratorExit",
    "another program": "os.execvp('true', ['true'])",
}
HANGS = {
    "sleeps": "time.sleep(10**6)",
    "a loop": "while True: pass",
    "deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(10**6)",
    "a lock": "threading.Event().wait()",
    "catches all": "exec('while True:\\n  try:\\n    time.sleep(9)\\n  except BaseException:\\n    pass')",
}
AUDIT = ("audit", "--images", "1", "--rounds", "1", "--clients", "2", "--attack", "analytic", "--defense", "none")
GATE = (*AUDIT, "--no-meter", "--fail-on", "recovered", "--out", "run")
OF_OWN = ("--model", "own:make", "--loss", "own:loss", "--dataset", "own:data")


def own(folder: Path, strike: str, place: str) -> None:
    """Write a module with a fault in one of its places."""
    calls = {name: "strike()" if name == place else "pass" for name in PLACES}
    (folder / "own.py").write_text(OWN.format(strike=strike, **calls))


def held(found: Outcome, folder: Path) -> None:
    """Check that a command that did not do its work said so, in a line, and by its exit code."""
    assert found.code not in (0, None), found
    assert "passed." not in found.err.replace("Nothing has passed.", "").replace("nothing has passed.", ""), found
    assert not list(folder.glob("run/report.html")), found
    assert "gradveil: " in found.err, found
    assert "Traceback" not in found.err, found


CASES = [(end, place) for end in ENDS for place in PLACES]
SHORT = [
    ("sys.exit(0)", "in_forward"),
    ("os._exit(0)", "in_loss"),
    ("killed", "in_make"),
    ("os._exit(0)", "on_import"),
    ("a generator's end", "in_forward"),
]


@pytest.mark.parametrize(
    ("end", "place"), [case if case in SHORT else pytest.param(*case, marks=pytest.mark.long) for case in CASES]
)
def test_what_ends_the_process_does_not_pass(stage: Stage, tmp_path: Path, end: str, place: str, count: Count) -> None:
    own(tmp_path, ENDS[end], place)
    words = [GATE, ("train", "--rounds", "1", "--clients", "2", "--out", "run")]
    for given in words[: times(1, 2)]:
        (found,) = stage.run(Act((*given, *OF_OWN), str(tmp_path), watched=True))
        held(found, tmp_path)
        assert not found.alive, found
        count("gates whose model, loss or data ended the process")


@pytest.mark.parametrize("hang", ["deaf", *(pytest.param(h, marks=pytest.mark.long) for h in HANGS if h != "deaf")])
def test_what_hangs_ends_at_its_minutes(stage: Stage, tmp_path: Path, hang: str, count: Count) -> None:
    own(tmp_path, HANGS[hang], "in_forward")
    before = time.monotonic()
    (found,) = stage.run(Act((*GATE, *OF_OWN, "--minutes", "0.1"), str(tmp_path), watched=True))
    assert time.monotonic() - before < 6 + 15 + 5 + 30
    held(found, tmp_path)
    assert "the time (--minutes) was over" in found.err, found
    assert not found.alive, found
    count("gates whose model hangs")


def test_a_gate_that_is_done_is_as_before(stage: Stage, tmp_path: Path) -> None:
    own(tmp_path, "pass", "in_data")
    (found,) = stage.run(Act((*GATE, *OF_OWN), str(tmp_path), watched=True))
    assert found.code == 3, found  # an undefended update of one image
    assert "Gate (--fail-on recovered): failed." in found.err, found
    assert (tmp_path / "run/report.html").exists()
    (refused,) = stage.run(Act(("audit", "--rounds", "x"), str(tmp_path), watched=True))
    assert refused.code == 2, refused
    (listed,) = stage.run(Act(("list", "defense"), str(tmp_path), watched=True))
    assert (listed.code, listed.err) == (0, ""), listed


def test_a_command_killed_at_a_write_does_not_pass(stage: Stage, tmp_path: Path, count: Count) -> None:
    for at in range(1, times(3, 40)):
        folder = tmp_path / str(at)
        folder.mkdir()
        (found,) = stage.run(Act((*GATE, *SMALL[:2]), str(folder), "before", at, watched=True))
        if found.code in (3, 4):
            break
        assert found.code == 128 + signal.SIGKILL, found
        assert one_line(found), found
        count("gates killed at a write")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_who_watches_hands_on_what_it_is_told(
    stage: Stage, tmp_path: Path, number: signal.Signals, count: Count
) -> None:
    moments = random.Random(number)
    for i in range(times(1, 8)):
        folder = tmp_path / str(i)
        folder.mkdir()
        words = (*COMMANDS["train sequential"], "--rounds", "100000", "--out", "run")
        act = Act(words, str(folder), after=moments.uniform(0.3, 1.5), number=number, watched=True)
        (found,) = stage.run(act)
        expected = -number if number == signal.SIGKILL else 128 + number
        assert found.code == expected, found
        assert not found.alive, found
        assert number == signal.SIGKILL or found.err.splitlines()[-1].startswith("gradveil: stopped."), found
        count("watched commands told to end")
