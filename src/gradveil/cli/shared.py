"""What the commands share: options in the same words, a display of progress, and how a run is stopped."""

import json
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradveil.auditing.run_folder import plain_json
from gradveil.cli.options import WORDS, Columns
from gradveil.cli.watchdog import stopping
from gradveil.errors import SpecError
from gradveil.imports import is_import_path
from gradveil.pace import Limit, as_clock

NATURAL = "natural"  # the partition of a table with --by
_CORES = "on a CPU one for each core, at most 8; on CUDA 1"

# options of commands that fill no settings of the library
Data = Annotated[str | None, typer.Option(show_default="$GRADVEIL_DATA", help=WORDS["data"][1])]
Seed = Annotated[int, typer.Option(help=WORDS["seed"][1])]
Device = Annotated[str, typer.Option(help=WORDS["device"][1])]
Resume = Annotated[bool, typer.Option("--resume", help=WORDS["resume"][1])]
Only = Annotated[str, typer.Option(help="Only the units of work whose name fits this pattern.")]
Jobs = Annotated[int | None, typer.Option(min=1, show_default=_CORES, help="Processes of one thread.")]
Json = Annotated[bool, typer.Option("--json", help=WORDS["json"][1])]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help=WORDS["quiet"][1])]


def print_json(value: Any) -> None:
    """Print a value for programs: what is not a finite number becomes null."""
    plain = "utf" not in (sys.stdout.encoding or "").lower()  # its letters would be lost
    typer.echo(json.dumps(plain_json(value), indent=2, ensure_ascii=plain, allow_nan=False, default=str))


def width() -> int:
    """Return how many letters a line has."""
    return min(shutil.get_terminal_size().columns, 100)


def table_spec(given: Mapping[str, Any]) -> str | None:
    """Return the spec of a data set, of a table with its columns' roles."""
    named = {f.name: given[f.name] for f in fields(Columns)}
    dataset: str | None = given["dataset"]
    is_file = dataset is not None and Path(dataset).suffix.lower() in (".csv", ".tsv", ".parquet", ".pq")
    roles = {name: value for name, value in named.items() if value is not None}
    if not is_file and not roles:
        return dataset
    target, by = given["target"], given["by"]
    if dataset is None or target is None or not (is_file or is_import_path(dataset)):
        wrong = "--target COLUMN" if target is None else "--dataset FILE.csv"
        raise SpecError(f"A table needs its file and the column to predict: give {wrong} as well.")
    columns = {n: v.replace(",", "/") if n in ("categorical", "drop") else v for n, v in roles.items()}
    if odd := [v for v in (dataset, target, by or "") if set(v) & set(",=")]:
        raise SpecError(f"{odd[0]!r} has a comma or an equals sign in its name, which a spec cannot hold. Rename it.")
    return "table:" + ",".join(f"{name}={value}" for name, value in {"path": dataset, **columns}.items())


class Display:
    """How far each stage is and how long it will take, on standard error so that results can be piped.

    A terminal shows a bar for each stage. Elsewhere a stage has a line when it begins, one now and then, and one when
    it ends; a stage of steps, which begins again and again, only the one now and then. ``tick`` says a line where
    nothing was said for long.
    """

    EVERY = 30.0  # seconds between lines

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
        self._begun = self._said = time.monotonic()
        self._at = ""  # what was heard last
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
        if done == 0:
            self._bars.reset(self._tasks[stage])
        self._bars.update(self._tasks[stage], completed=done, total=total, note=note)

    def say(self, text: str) -> None:
        """Say a line beside the stages."""
        if self._bars is not None and self._tasks:
            self._bars.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            self._echo(text)

    def tick(self) -> None:
        """Say that work goes on, where nothing was said for long."""
        if not self._quiet and self._bars is None and time.monotonic() - self._said >= self.EVERY:
            gone = as_clock(time.monotonic() - self._begun)
            self._echo(f"at work for {gone}" + (f", {self._at}" if self._at else ""))

    def _echo(self, text: str) -> None:
        self._said = time.monotonic()
        typer.echo(text, err=True)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._tasks and self._bars is not None:
            self._bars.stop()

    def _line(self, stage: str, done: int, total: int, note: str) -> None:
        now, steps = time.monotonic(), stage.endswith("steps")
        self._at = f"{stage}: {done} of {total}"
        fresh = (now, done, now if steps else -math.inf, -1)
        began, before, said, last = self._lines.setdefault(stage, fresh)
        if steps and done < last:  # it begins again
            began, before, last = now, done, -1
        self._lines[stage] = (began, before, said, done if steps else last)
        if (not steps and (last >= total or (done < total and now - said < self.EVERY))) or (
            steps and now - said < self.EVERY
        ):
            return
        self._lines[stage] = (began, before, now, done)
        words = [self._at, note]
        if done > before:
            words.append(f"{as_clock(now - began)} so far")
            if done < total:
                words.append(f"about {as_clock((now - began) / (done - before) * (total - done))} left")
        self._echo(", ".join(filter(None, words)))


class _Sayer(logging.Handler):
    """Passes what the library says on to the display."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Say one line."""
        self.display.say(record.getMessage())


@contextmanager
def _speaking(display: Display, quiet: bool) -> Iterator[None]:
    """Within, the display says what the library has to say, and that work goes on."""
    if quiet:
        yield
        return
    log, handler, over = logging.getLogger("gradveil"), _Sayer(display), threading.Event()
    before = log.level, log.propagate

    def ticks() -> None:
        while not over.wait(Display.EVERY / 3):
            display.tick()

    threading.Thread(target=ticks, daemon=True).start()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        over.set()
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@contextmanager
def running(quiet: bool, how_to_go_on: str = "") -> Iterator[Display]:
    """Show progress; Ctrl-C and SIGTERM end the run with one line that says how to go on."""
    display = Display(quiet)
    line = f"What was finished is kept: continue with {how_to_go_on}." if how_to_go_on else "Nothing was kept."
    try:
        with (
            stopping(line, display.stop),
            _speaking(display, quiet),
        ):
            yield display
    finally:
        display.stop()


@contextmanager
def working(quiet: bool, stage: str) -> Iterator[None]:
    """Show how far one piece of work is, by the steps that its loops tell."""
    with running(quiet) as display, Limit(tell=partial(display, f"{stage} steps")) as limit:
        yield
        if limit.steps:
            display(f"{stage} steps", limit.steps, limit.steps)


def resume_with(out: Path | None) -> str:
    """Return the options that continue a run in this folder."""
    return f"--resume --out {out}" if out else "--resume and the same --out"
