"""What the commands share: options in the same words, a display of progress, and how a run is stopped."""

import json
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradveil.errors import SpecError
from gradveil.experiments.run_folder import plain_json

OWN = "or module:function that makes your own."
T = TypeVar("T")

Data = Annotated[str | None, typer.Option(help="Folder with the data sets (default: GRADVEIL_DATA).")]
Model = Annotated[str, typer.Option(help=f"A model spec, {OWN}")]
Loss = Annotated[str, typer.Option(help="cross_entropy, bce, mse, or module:function, your own loss(output, target).")]
Seed = Annotated[int, typer.Option(help="One seed for everything.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables and progress.")]

# of the local steps
_local = partial(typer.Option, rich_help_panel="Local steps")
Optimizer = Annotated[str, _local(help="sgd, adam or adamw.")]
Momentum = Annotated[float, _local(help="Of sgd.")]
WeightDecay = Annotated[float, _local(help="Of the optimizer.")]
Proximal = Annotated[float, _local(help="FedProx's factor mu.")]
Clip = Annotated[float, _local(help="Largest norm of a step's gradient; 0: none.")]

# of a saved update
Weights = Annotated[str | None, typer.Option(help="Safetensors: the weights that the server sent.")]
Before = Annotated[str | None, typer.Option(help="Safetensors: the weights before, if --update has those after.")]
Kind = Annotated[str | None, typer.Option(help="gradient, difference or weights; default: as the file says.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate of the local steps.")]
InputShape = Annotated[str | None, typer.Option(help="E.g. 1x28x28, without --dataset.")]
Classes = Annotated[int, typer.Option(help="Number of classes, or of outputs, without --dataset.")]


def print_json(value: Any) -> None:
    """Print a value for programs: what is not a finite number becomes null."""
    typer.echo(json.dumps(plain_json(value), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def renamed(old: str, value: T | None, new: str, otherwise: T) -> T:
    """Return the value of an option by its old name, with a line that says the new one; else the other value."""
    if value is None:
        return otherwise
    typer.echo(f"gradveil: {old} is called {new} now.", err=True)
    return value


def read_shape(text: str | None) -> tuple[int, ...] | None:
    """Read ``1x28x28``."""
    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise SpecError(f"--input-shape {text!r} cannot be read: give sizes joined by 'x', e.g. 1x28x28.")
    return shape


class Display:
    """How far each stage is and how long it will take, on standard error so that results can be piped.

    A terminal shows a bar for each stage. Elsewhere a stage has a line when it begins, one now and then, and one when
    it ends.
    """

    EVERY = 10.0  # seconds between lines

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description:9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._quiet = quiet
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._tasks: dict[str, Any] = {}
        self._lines: dict[
            str, tuple[float, int, float, int]
        ] = {}  # begun when and with how much; last line's time, done

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show how much of a stage is done."""
        if self._quiet:
            return
        if self._bars is None:
            self._line(stage, done, total, note)
            return
        if stage not in self._tasks:
            self._bars.start()  # not before: an error in the settings is one line and no empty bar
            self._tasks[stage] = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._tasks[stage], completed=done, total=total, note=note)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._tasks and self._bars is not None:
            self._bars.stop()

    def _line(self, stage: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        began, before, said, last = self._lines.setdefault(stage, (now, done, -math.inf, -1))
        if last >= total or (done < total and now - said < self.EVERY):
            return
        self._lines[stage] = (began, before, now, done)
        words = [f"{stage}: {done} of {total}", note]
        if done > before:
            words.append(f"{_clock(now - began)} so far")
            if done < total:
                words.append(f"about {_clock((now - began) / (done - before) * (total - done))} left")
        typer.echo(", ".join(filter(None, words)), err=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class _Terminated(KeyboardInterrupt):
    """The system asked the process to end."""


@contextmanager
def running(quiet: bool, how_to_go_on: str) -> Iterator[Display]:
    """Show progress; Ctrl-C and SIGTERM end the run with one line that says how to go on."""

    def terminate(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
        for worker in multiprocessing.active_children():  # they hear Ctrl-C themselves
            worker.terminate()
        raise _Terminated

    is_main = threading.current_thread() is threading.main_thread()
    before: Any = signal.signal(signal.SIGTERM, terminate) if is_main else None
    display = Display(quiet)
    try:
        yield display
    except KeyboardInterrupt as stop:
        display.stop()
        typer.echo(f"gradveil: stopped. What was finished is kept: continue with {how_to_go_on}.", err=True)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None
    finally:
        display.stop()
        if is_main:
            signal.signal(signal.SIGTERM, before)


def resume_with(out: Path | None) -> str:
    """Return the options that continue a run in this folder."""
    return f"--resume --out {out}" if out else "--resume and the same --out"
