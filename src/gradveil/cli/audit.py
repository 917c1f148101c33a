"""``gradveil audit``: what do the updates of this model give away, and does a defence help?"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from gradveil import pace
from gradveil.auditing.audit import Audit, audit, default_folder
from gradveil.auditing.gate import GATED, FailOn, left_out, read_fail_on, summary
from gradveil.auditing.run_folder import ROWS, RunFolder, from_toml
from gradveil.auditing.saved_update import UpdateAuditConfig, audit_update
from gradveil.cli import shared, watchdog
from gradveil.cli.options import NAMES, Columns, Given, Option, Output, takes
from gradveil.errors import SpecError
from gradveil.ranges import hints_of
from gradveil.report.page import draw, write_report
from gradveil.report.table import verdict_table
from gradveil.threats.rows import best_floor
from gradveil.threats.setup import AuditConfig


@dataclass(frozen=True, kw_only=True)
class AuditOptions(Output):
    """What the command takes beside the settings of an audit."""

    out: Path | None = None
    fail_on: str | None = None
    resume: bool = False
    meter: bool = True
    config: Path | None = None


SHOWN = 5  # lines of what was not tried
FIRST = "model dataset defense attack update weights minutes fail_on out resume json"


@takes(
    AuditConfig,
    UpdateAuditConfig,
    Columns,
    AuditOptions,
    first=FIRST,
    model=Option(default="what suits the data set; with --update lenet"),
    dataset=Option(default="digits; with --update none"),
    defense=Option("A defence spec; repeat for several.", default="a panel of four; with --update none"),
    attack=Option("An attack spec; repeat for several."),
    loss=Option(default="cross_entropy; with --update as the file says"),
    minutes=Option(default="none; of networks above half a million weights 5"),
    out=Option(default="a new one under runs"),
    update=Option(default="none"),
    rounds=Option("Rounds of training; the first and the last are attacked. Large networks: none unless given."),
    examples=Option(default="1; with --update as the file says"),
    batch_size=Option(default="8; with --update as the file says"),
    lr=Option(default="0.3; with --update as the file says"),
    meter=Option("Certify and meter leaks after the attacks.", "The run"),
)
def command(given: Given) -> None:
    """Audit a federated run (default: digits, a small LeNet, four defences) or one saved update."""
    limit = pace.Limit(pace.seconds_of(given["minutes"]) - watchdog.spent())  # setting up counts, too
    gate = read_fail_on(given["fail_on"])
    out, quiet = given["out"] or default_folder(), given["json"] or given["quiet"]
    run = _federated(given) if given["update"] is None else _saved(given)
    with (
        shared.running(quiet, shared.resume_with(out)) as progress,
        limit,
        redirect_stdout(sys.stderr) if given["json"] else nullcontext(),  # what a user's own code prints is no JSON
    ):
        whole = partial(run, out=out, resume=given["resume"], progress=progress, written=_Pages(progress))
        found = _run_to_report(whole, out)
    _show(found, given["json"], gate, given["tier"] or GATED)


class _Pages:
    """Draws the report while the run goes on: with the first pictures, then now and then."""

    EVERY = 30.0  # seconds

    def __init__(self, display: shared.Display) -> None:
        self._display, self._next = display, -math.inf

    def __call__(self, store: RunFolder) -> None:
        """Draw it, unless that was done just now."""
        if time.monotonic() < self._next:
            return
        page = draw(store)
        if self._next < 0:
            self._display.say(f"first pictures: {page}")
        self._next = time.monotonic() + self.EVERY


def _run_to_report(run: Callable[[], Audit], out: Path) -> Audit:
    """Run an audit; one that is stopped leaves the report of what it has."""
    try:
        return run()
    except KeyboardInterrupt:
        if (out / ROWS).is_file():
            typer.echo(f"Report of what was done: {write_report(out)}", err=True)
        raise


def _federated(given: Given) -> Callable[..., Audit]:
    _refuse(given, AuditConfig, UpdateAuditConfig, "--update")
    config, base = given["config"], AuditConfig()
    if config is not None:
        if not config.is_file():
            raise SpecError(f"There is no file {config}.")
        base = from_toml(AuditConfig, config.read_text(encoding="utf-8"))
    chosen = given.fill(
        base,
        dataset=shared.table_spec(given),
        partition=given["partition"] or (shared.NATURAL if given["by"] else None),
        trained=True if given["rounds"] else given["trained"],
        meter_seconds=None if given["meter"] else 0.0,
    )
    watchdog.end_after(chosen.minutes)
    return lambda **rest: audit(config=chosen, **rest)


def _saved(given: Given) -> Callable[..., Audit]:
    _refuse(given, UpdateAuditConfig, AuditConfig, "a federated run")
    if not given["meter"]:
        raise SpecError("--no-meter belongs to a federated run. Leave it out, or give what it needs.")
    defenses = given["defense"] or ["none"]
    if len(defenses) > 1:
        raise SpecError("A saved update was made under one defence. Give one --defense, or join several by '+'.")
    start = UpdateAuditConfig(given["update"], defense=defenses[0])
    chosen = given.without("update", "defense").fill(start, dataset=shared.table_spec(given))
    watchdog.end_after(chosen.minutes)
    return lambda **rest: audit_update(chosen, **rest)


def _refuse(given: Given, takes: type, other: type, needs: str) -> None:
    """Raise where an option was given that only the other kind of audit takes."""
    own, others = ({NAMES.get(f, f) for f in hints_of(cls)} for cls in (takes, other))
    for name in given:
        if name in others - own and given[name] is not None:
            raise SpecError(f"--{name.replace('_', '-')} belongs to {needs}. Leave it out, or give what it needs.")


def _show(found: Audit, json: bool, fail_on: FailOn | None, tiers: Sequence[str]) -> None:
    page = write_report(found.folder)
    told = summary(found, page, fail_on, tiers)
    if json:
        shared.print_json(told)
    else:
        console = Console()
        for error in told["errors"]:
            console.print(f"[bold red]Error.[/] {escape(error)}\n", highlight=False)
        console.print(verdict_table(found.verdicts, best_floor(found.rows)))
        if found.headline not in [v.text for v in found.verdicts]:
            console.print(f"\n{found.headline}")
        if left := left_out(found.rows):
            count = f"{len(left)} kinds of attack, each with why, at the end of the report"
            said = [f"{what}: {why}" for what, why in left] if len(left) <= SHOWN else [count]
            for text in said:
                console.print(f"Not tried: {text}.", highlight=False, markup=False, soft_wrap=True)
        typer.echo(f"Report: {page}")
    if gate := told["gate"]:
        typer.echo(f"Gate (--fail-on {fail_on}): {gate['result']}. {gate['why']}.", err=True)
        for part in told["not_run"]:
            typer.echo("Not run: {attack} on {defense}, {server} server, {round} round: {why}".format(**part), err=True)
        raise typer.Exit(gate["exit_code"])
