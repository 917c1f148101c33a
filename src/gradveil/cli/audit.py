"""``gradveil audit``: what do the updates of this model give away, and does a defence help?"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from gradveil import pace
from gradveil.cli import shared, watchdog
from gradveil.errors import SpecError

if TYPE_CHECKING:
    from gradveil.auditing.audit import Audit
    from gradveil.auditing.gate import FailOn
    from gradveil.auditing.run_folder import RunFolder

of_run = partial(typer.Option, rich_help_panel="A federated run")
SHOWN = 5  # lines of what was not tried
of_update = partial(typer.Option, rich_help_panel="A saved update")


def command(
    model: str = typer.Option(
        None, show_default=f"{shared.SUITS}; with --update lenet", help=f"A model spec, {shared.OWN}"
    ),
    dataset: str = typer.Option(
        None,
        show_default="digits; with --update none",
        help="A data set by name, a CSV or parquet file, or module:function, your own.",
    ),
    data: shared.Data = None,
    target: shared.Target = None,  # type: ignore[assignment]
    categorical: shared.Categorical = None,  # type: ignore[assignment]
    drop: shared.Drop = None,  # type: ignore[assignment]
    by: shared.By = None,  # type: ignore[assignment]
    defense: list[str] = typer.Option(
        None,
        show_default="a panel of four; with --update none",
        help="A defence spec; repeat for several.",
    ),
    attack: list[str] = typer.Option(
        None, show_default="those that suit the model", help="An attack spec; repeat for several."
    ),
    tier: list[str] = typer.Option(
        None,
        show_default="all; with --attack the first two",
        help="Servers: oblivious, knows, informed, patient, malicious; repeat for several.",
    ),
    seed: int = typer.Option(None, show_default="0", help="One seed for everything."),
    device: str = typer.Option(None, show_default="cpu", help=shared.DEVICES),
    loss: str = typer.Option(None, show_default="cross_entropy; with --update as the file says", help=shared.LOSSES),
    minutes: float = typer.Option(
        None,
        show_default="none; of networks above half a million weights 5",
        help="Time limit for all of it: every server gets an answer before any gets a second.",
    ),
    weights: str = typer.Option(
        None,
        show_default="the model's own",
        help="The weights that clients receive: safetensors, or .pt of tensors alone.",
    ),
    out: Path = typer.Option(None, show_default="a new one under runs", help="The run folder."),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
    fail_on: str = typer.Option(
        None,
        help="recovered, recognised or unproved: exit with 3 where a server gets that far, or nothing is proved; 4 "
        "where the audit cannot tell.",
    ),
    resume: shared.Resume = False,
    rounds: int = of_run(
        None,
        show_default="10",
        help="Rounds of training; the first and the last are attacked. Large networks: none unless given.",
    ),
    images: int = of_run(None, show_default="8", help="Images, or rows, under attack."),
    examples: int = of_run(
        None, show_default="1; with --update as the file says", help="Examples of one attacked update."
    ),
    partition: str = of_run(None, show_default="iid:devices=10", help="How examples are dealt out to clients."),
    clients: int = of_run(None, show_default="5", help="Clients that train in a round."),
    epochs: int = of_run(None, show_default="1", help="Local epochs."),
    batch_size: int = of_run(
        None, show_default="8; with --update as the file says", help="Examples of a local step; 0: all of them."
    ),
    lr: float = of_run(
        None, show_default="0.3; with --update as the file says", help="Learning rate of the local steps."
    ),
    optimizer: shared.Optimizer = None,  # type: ignore[assignment]
    momentum: shared.Momentum = None,  # type: ignore[assignment]
    weight_decay: shared.WeightDecay = None,  # type: ignore[assignment]
    proximal: shared.Proximal = None,  # type: ignore[assignment]
    clip: shared.Clip = None,  # type: ignore[assignment]
    trains: shared.Trains = None,  # type: ignore[assignment]
    meter_seconds: float = of_run(
        None, show_default="60", help="Time limit of certificates and leak meter, which come last."
    ),
    no_meter: bool = of_run(False, "--no-meter", help="Leave certificates and leak meter out."),
    config: Path = of_run(None, help="Settings from a TOML file; options go before it."),
    update: str = of_update(None, help="A safetensors file: gradients, a difference, or weights."),
    kind: str = of_update(None, show_default=shared.AS_SAID, help="gradient, difference or weights."),
    before: str = of_update(None, help="Safetensors: the weights before, if --update has those after."),
    truth: str = of_update(None, help="Safetensors with inputs and labels: what was trained on."),
    steps: int = of_update(None, show_default=shared.AS_SAID, help="Local steps behind the update."),
    input_shape: str = of_update(None, help="E.g. 1x28x28, without --dataset and --truth."),
    classes: int = of_update(None, show_default="10", help="Number of classes, or of outputs, without --dataset."),
) -> None:
    """Audit a federated run (default: digits, a small LeNet, four defences) or one saved update."""
    limit = pace.Limit(pace.seconds_of(minutes))  # imports and setting up count, too
    from gradveil.auditing.audit import default_folder
    from gradveil.auditing.gate import GATED, read_fail_on

    gate = read_fail_on(fail_on)
    out = out or default_folder()
    dataset = shared.table_spec(dataset, target, categorical, drop, by)  # type: ignore[assignment]
    partition = partition or (shared.NATURAL if by else None)  # type: ignore[assignment]
    options: dict[str, Any] = {"model": model, "dataset": dataset, "data": data, "seed": seed}
    options |= {"device": device, "minutes": minutes}
    options |= {"lr": lr, "batch_size": batch_size, "loss": loss, "optimizer": optimizer, "momentum": momentum}
    options |= {"weight_decay": weight_decay, "proximal": proximal, "clip": clip}
    options["attacks"] = tuple(attack) if attack else None
    run: Callable[..., Audit]
    if update is None:
        _refuse("--update", kind=kind, before=before, truth=truth, steps=steps, input_shape=input_shape)
        options |= {"rounds": rounds, "images": images, "examples": examples, "partition": partition}
        options |= {"trained": True if rounds else None, "weights": weights}
        options |= {
            "trains": trains,
            "clients": clients,
            "epochs": epochs,
            "defenses": tuple(defense) if defense else None,
        }
        options["tiers"] = tuple(tier) if tier else None
        options["meter_seconds"] = 0.0 if no_meter else meter_seconds
        run = _federated(options, config)
    else:
        _refuse("a federated run", rounds=rounds, images=images, partition=partition, clients=clients, epochs=epochs)
        _refuse("a federated run", trains=trains)
        _refuse("a federated run", meter_seconds=meter_seconds, no_meter=no_meter or None)
        options |= {"update": update, "kind": kind, "weights": weights, "before": before, "truth": truth}
        options |= {"num_steps": steps, "num_examples": examples, "num_classes": classes}
        options |= {"defense": _one(defense), "input_shape": shared.read_shape(input_shape)}
        run = _saved(options)
    with (
        shared.running(json or quiet, shared.resume_with(out)) as progress,
        limit,
        redirect_stdout(sys.stderr) if json else nullcontext(),  # what a user's own code prints is no JSON
    ):
        found = _run_to_report(partial(run, out=out, resume=resume, progress=progress, written=_Pages(progress)), out)
    _show(found, json, gate, tier or GATED)


class _Pages:
    """Draws the report while the run goes on: with the first pictures, then now and then."""

    EVERY = 30.0  # seconds

    def __init__(self, display: shared.Display) -> None:
        self._display, self._next = display, -math.inf

    def __call__(self, store: "RunFolder") -> None:
        """Draw it, unless that was done just now."""
        from gradveil.report.page import draw

        if time.monotonic() < self._next:
            return
        page = draw(store)
        if self._next < 0:
            self._display.say(f"first pictures: {page}")
        self._next = time.monotonic() + self.EVERY


def _run_to_report(run: "Callable[[], Audit]", out: Path) -> "Audit":
    """Run an audit; one that is stopped leaves the report of what it has."""
    from gradveil.auditing.run_folder import ROWS
    from gradveil.report.page import write_report

    try:
        return run()
    except KeyboardInterrupt:
        if (out / ROWS).is_file():
            typer.echo(f"Report of what was done: {write_report(out)}", err=True)
        raise


def _federated(options: dict[str, Any], config: Path | None) -> "Callable[..., Audit]":
    from gradveil.auditing.audit import audit
    from gradveil.auditing.settings import from_toml
    from gradveil.threats.setup import AuditConfig

    base = AuditConfig()
    if config is not None:
        if not config.is_file():
            raise SpecError(f"There is no file {config}.")
        base = from_toml(AuditConfig, config.read_text(encoding="utf-8"))
    chosen = replace(base, **_given(options))
    watchdog.end_after(chosen.minutes)
    return lambda **rest: audit(config=chosen, **rest)


def _saved(options: dict[str, Any]) -> "Callable[..., Audit]":
    from gradveil.auditing.saved_update import UpdateAuditConfig, audit_update

    chosen = UpdateAuditConfig(**_given(options))
    watchdog.end_after(chosen.minutes)
    return lambda **rest: audit_update(chosen, **rest)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given; a batch size of 0 is that of all examples in one step."""
    given = {key: value for key, value in options.items() if value is not None}
    return given | ({"batch_size": None} if given.get("batch_size") == 0 else {})


def _refuse(belongs_to: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise SpecError(f"--{name.replace('_', '-')} belongs to {belongs_to}. Leave it out, or give what it needs.")


def _one(defense: list[str] | None) -> str | None:
    if defense and len(defense) > 1:
        raise SpecError("A saved update was made under one defence. Give one --defense, or join several by '+'.")
    return defense[0] if defense else None


def _show(found: "Audit", json: bool, fail_on: "FailOn | None", tiers: Sequence[str]) -> None:
    from gradveil.report.page import write_report
    from gradveil.report.summary import left_out, summary
    from gradveil.report.table import verdict_table
    from gradveil.threats.rows import best_floor

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
