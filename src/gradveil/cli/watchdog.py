"""How a command ends: watched, stopped by a signal, or done.

It runs in a process of its own, and counts as done when that process has said so: how it ends is not enough.

A model, a loss or a data set may end the process (``os._exit(0)``, a crash, the system when memory runs out) or never
give it back. Who watches is the process that was started; it imports nothing that a user brings.
"""

import multiprocessing
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer

from gradveil import files
from gradveil.pace import clock

GRACE = 15.0  # seconds after --minutes until a command is told to end; less where they are few
LAST = 5.0  # seconds after that until it is killed
EVERY = 0.2  # seconds between two looks
_DONE, _ENDS = b"d", b"e"  # what the command says: its exit code, and when it must have ended
_FORM = struct.Struct("<cd")
_says: int | None = None  # where it says so
_began: float | None = None  # when the process of the command did


def watched(run: Callable[[], None]) -> NoReturn:
    """Run a command in a process of its own and end as it does; where it ends without a word, with an error."""
    hears, says = os.pipe()
    lives, holds = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hears)
        os.close(holds)
        _perform(run, says, lives)
    os.close(says)
    os.close(lives)
    sys.exit(_Watch(child, hears).code())


def done(code: int) -> None:
    """Say that the command has done all it had to do, and has this exit code."""
    _say(_DONE, code)


def end_after(minutes: float | None) -> None:
    """Say that the command must have ended so many minutes after its start, and some seconds."""
    if minutes is not None:
        _say(_ENDS, clock() - spent() + 60 * minutes + min(GRACE, max(LAST, 60 * minutes)))


def spent() -> float:
    """Return how many seconds ago the process of the command began: what it imported took some of them."""
    return 0.0 if _began is None else clock() - _began


def _say(what: bytes, number: float) -> None:
    if _says is not None:
        os.write(_says, _FORM.pack(what, number))


def _perform(run: Callable[[], None], says: int, lives: int) -> NoReturn:
    """Run the command, and end when the process that watches has ended."""
    global _says, _began
    _says, _began, files.started_as = says, clock(), os.getppid()

    def end_with_parent() -> None:
        os.read(lives, 1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    run()
    sys.exit(1)  # never: ``run`` ends the process


class _Watch:
    """Waits for the command, hands on what it is told to do, and ends it when its time is over."""

    def __init__(self, child: int, hears: int) -> None:
        self.child, self.hears = child, hears
        self.said: int | None = None  # its exit code
        self.end = float("inf")
        self.told = self.over = 0  # the signal that it was told to end by; how often time was over
        self._told_at = 0.0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, _: object) -> None:
        self.told, self._told_at = number, clock()

    def code(self) -> int:
        """Wait for the end and return the exit code."""
        while True:
            self._listen()
            ended, status = os.waitpid(self.child, os.WNOHANG)
            if ended:
                self._listen(0.0)
                return self._code(os.waitstatus_to_exitcode(status))
            self._hand_on()

    def _listen(self, seconds: float = EVERY) -> None:
        while self.hears >= 0 and select.select([self.hears], [], [], seconds)[0]:
            heard = os.read(self.hears, _FORM.size)
            if len(heard) < _FORM.size:  # it has ended, or closed what it speaks through
                os.close(self.hears)
                self.hears = -1
                break
            what, number = _FORM.unpack(heard)
            if what == _DONE:
                self.said = int(number)
            else:
                self.end = number
            seconds = 0.0
        if self.hears < 0:
            time.sleep(min(seconds, 0.01))

    def _hand_on(self) -> None:
        """Tell the command to end where this process was told, or its time is over.

        A terminal's Ctrl-C reaches both processes, so the command hears of another signal, and a moment later.
        """
        now = clock()
        if self._told_at and now > self._told_at + EVERY:
            os.kill(self.child, signal.SIGTERM)
            self._told_at = 0.0
        if now > self.end + self.over * LAST and self.over < 2:
            os.kill(self.child, signal.SIGKILL if self.over else signal.SIGTERM)
            self.over += 1

    def _code(self, code: int) -> int:
        if self.over and self.said in (None, 128 + signal.SIGTERM):
            _tell(
                "the time (--minutes) was over and the command had not ended, so it was ended: nothing has passed. "
                "A run folder keeps what was finished: --resume."
            )
            return 2
        if self.said is not None:
            return 128 + self.told if self.told and self.said == 128 + signal.SIGTERM else self.said
        if code < 0:
            _tell(f"the process of the command was ended by {signal.Signals(-code).name}: nothing has passed.")
            return 128 - code
        _tell(
            f"the process of the command ended by itself (exit code {code}) before it was done: code that it ran, a "
            "model, a loss or a data set, ended it. Nothing has passed."
        )
        return 2


def _tell(line: str) -> None:
    print(f"gradveil: {line}", file=sys.stderr)


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopping(line: str, last: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within, a signal ends the command with a line and exit code 130 (Ctrl-C) or 143; ``last`` is called before."""
    before = _listen()
    try:
        yield
    except KeyboardInterrupt as stop:
        last()
        typer.echo(f"gradveil: stopped. {line}".rstrip(), err=True)
        raise typer.Exit(128 + getattr(stop, "number", signal.SIGINT)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen() -> dict[signal.Signals, Any]:
    """Listen to signals; a shell's background jobs, and other threads than the first, go on as they are."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, _stop) for number in heard}


def _stop(number: int, _: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C does not wait
    for worker in multiprocessing.active_children():  # they do not hear Ctrl-C
        worker.terminate()
    raise Stopped(number)
