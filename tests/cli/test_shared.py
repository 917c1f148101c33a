"""What commands share: the display of progress, and how a run is stopped."""

import io
import logging
import signal
from pathlib import Path
from typing import Any

import click
import pytest
from rich.console import Console

from gradveil import pace
from gradveil.cli import shared


def test_off_a_terminal_a_stage_has_a_line_when_it_begins_and_when_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    display = shared.Display(quiet=False)
    for done in (0, 1, 2, 3, 3):
        display("training", done, 3, "accuracy 0.5" if done else "")
    display("attacks", 4, 4)  # all of it was there before
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["training: 0 of 3", "training: 3 of 3, accuracy 0.5, 0:00:00 so far", "attacks: 4 of 4"]


def test_off_a_terminal_lines_in_between_say_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    display = shared.Display(quiet=False)
    for done in range(20, 141):  # 20 were done in an earlier run
        display("training", done, 6000)
        now[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "training: 20 of 6000"
    assert lines[1] == "training: 50 of 6000, 0:00:30 so far, about 1:39:10 left"
    assert len(lines) == 5  # one in thirty seconds


def test_off_a_terminal_steps_that_begin_again_have_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    display = shared.Display(quiet=False)
    for steps in (10, 10, 100):
        for done in range(steps + 1):
            display("gs steps", done, steps)
            now[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "gs steps: 8 of 100, 0:00:08 so far, about 0:01:32 left"
    assert len(lines) == 4


def test_off_a_terminal_a_line_comes_even_where_nothing_is_heard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    display = shared.Display(quiet=False)
    for second in range(100):
        now[0] += 1.0
        if second == 50:
            display("attacks", 0, 4)
        display.tick()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["at work for 0:00:30", "attacks: 0 of 4", "at work for 0:01:21, attacks: 0 of 4"]


def test_what_the_library_says_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("gradveil")
    with shared.running(False, "--resume"):
        log.info("plan: %d attacks", 3)
    log.info("not said")
    with shared.running(True, "--resume"):
        log.info("not said")
    assert capsys.readouterr().err == "plan: 3 attacks\n"


def test_on_a_terminal_there_is_a_bar_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(shared, "Console", lambda **_: Console(file=out, force_terminal=True, width=100))
    with shared.running(False, "--resume") as display:
        display("training", 1, 4, "accuracy 0.5")
        display("attacks", 2, 2)
    said = out.getvalue()
    assert all(word in said for word in ("training", "1/4", "accuracy 0.5", "attacks", "2/2"))


def test_one_piece_of_work_has_a_bar_by_the_steps_that_its_loop_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(shared, "Console", lambda **_: Console(file=out, force_terminal=True, width=100))
    with shared.working(False, "dlg"):
        for done in range(3):
            assert not pace.step(done, 3)
    assert "dlg steps" in out.getvalue()
    assert "3/3" in out.getvalue()
    with shared.working(False, "nothing"):
        pass
    assert "nothing" not in out.getvalue()


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with shared.running(True, "--resume") as display:
        display("training", 1, 4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_one_line(
    capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(click.exceptions.Exit) as stopped, shared.running(False, shared.resume_with(Path("run"))):
            signal.raise_signal(number)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert stopped.value.exit_code == code
    said = "gradveil: stopped. What was finished is kept: continue with --resume --out run.\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) == before


def test_json_has_no_number_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    value: dict[str, Any] = {"mse": float("nan"), "where": Path("run"), "ε": (1, 2)}
    shared.print_json(value)
    assert "".join(capsys.readouterr().out.split()) == '{"mse":null,"where":"run","ε":[1,2]}'
