"""How a command is stopped: Ctrl-C and SIGTERM end it and its workers, with one line and the usual exit code."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

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
