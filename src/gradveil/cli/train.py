"""``gradveil train``: federated averaging with any defence inside."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.auditing.certificates import in_words, of_run
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.auditing.train import TrainConfig, listed, train, turned_away, with_model
from gradveil.cli import shared
from gradveil.cli.options import Columns, Given, Option, Output, takes
from gradveil.cli.shared import NATURAL
from gradveil.data import load
from gradveil.errors import SpecError
from gradveil.protection.defense import build

_DEFAULT = TrainConfig()
ON_FLOWER = (  # its own settings
    "secure_aggregation", "lost", "max_change", "max_examples", "require_defense", "deadline", "min_replies",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Output):
    """What the command takes beside the settings of a training run."""

    out: Path = Path("runs/train")
    resume: bool = False
    tensorboard: bool = False
    verify: bool = False
    superlink: str | None = None
    root_certificates: Path | None = None
    secure_aggregation: bool | None = None
    lost: Annotated[float | None, Option(default="0")] = None
    max_change: Annotated[float | None, Option(default="10")] = None
    max_examples: int | None = None
    deadline: Annotated[float | None, Option(default="600")] = None
    min_replies: Annotated[int | None, Option(default="1")] = None
    require_defense: str | None = None


FIRST = "model dataset defense rounds clients partition lr engine out resume json"


@takes(
    TrainConfig,
    Columns,
    TrainOptions,
    first=FIRST,
    resume=Option("Continue a run that was stopped, or add rounds to it."),
)
def command(given: Given) -> None:
    """Train with federated averaging (default: digits, a small LeNet, no defence)."""
    dataset = shared.table_spec(given)
    config = given.fill(_DEFAULT, dataset=dataset, partition=given["partition"] or (NATURAL if given["by"] else None))
    out, json, quiet = given["out"] or TrainOptions.out, given["json"], given["json"] or given["quiet"]
    resume, verify = given["resume"], given["verify"]
    own, link = given.named(*ON_FLOWER), given.named("superlink", "root_certificates")
    if config.engine.partition(":")[0] == "flower":
        if verify:
            raise SpecError("--verify is not available with --engine flower: use another engine, or gradveil verify.")
        say = (lambda line: None) if quiet else partial(typer.echo, err=True)
        _train_on_flower(config, out, link, json, say, own | {"resume": resume})
        return
    if verify and "records" not in build(config.defense).acts_on:
        raise SpecError("--verify measures what a defence promises of a record: give one that does, e.g. veil.")
    if link or own:
        options = ("superlink", "root_certificates", *ON_FLOWER)
        raise SpecError(f"{', '.join(map(_option, options))} belong to --engine flower.")
    with shared.running(quiet, shared.resume_with(out)) as display:

        def advance(row: Row) -> None:
            word = row.get("scored_by", "accuracy")
            note = f"{word} {row['accuracy']:.4f}" if "accuracy" in row else ""
            display("training", row["round"], config.rounds, note)

        summary = train(config, out, resume=resume, tensorboard=given["tensorboard"], progress=advance)
        summary |= {"measured": of_run(config)} if verify else {}
    _show(summary, json)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _show(summary: dict[str, Any], json: bool) -> None:
    if json:
        shared.print_json(summary)
        return
    early = ", stopped early" if summary["stopped_early"] else ""
    word = summary["scored_by"][:1].upper() + summary["scored_by"][1:]
    typer.echo(f"{word} {summary['accuracy']:.4f} after {summary['rounds']} rounds{early}.")
    typer.echo(f"Best {summary['best_accuracy']:.4f} in round {summary['best_round']}.")
    if summary["rejected"]:
        typer.echo(f"Updates turned away: {listed(summary['rejected'])}.")
    if (bought := summary.get("bought")) is not None:
        tier = "each update" if bought["tier"] == "local" else "the sum of a round alone"
        typer.echo(
            f"Bought over the run, for the client that took part most, against a server that sees {tier}: z_run = "
            f"{bought['z_run']:.3g}, ε = {bought['epsilon']:.3g} at δ = {bought['delta']:g}; a guess of chance "
            f"{bought['blind_guess']:g} becomes at most {bought['guess']:.2g}. Simulated: the noise is the seed's."
        )
    if (found := summary.get("measured")) is not None:
        typer.echo(in_words(found))
    typer.echo(f"Run folder: {summary['folder']}")


def _train_on_flower(
    config: TrainConfig,
    out: Path,
    link: dict[str, Any],
    json: bool,
    say: Callable[[str], None],
    own: dict[str, Any],
) -> None:
    """Hand the run to Flower: simulated here, or submitted to a SuperLink."""
    from gradveil.integrations.flower.engine import check, simulate, submit
    from gradveil.integrations.flower.settings import FlowerSettings, strategy_for

    if link and "superlink" not in link:
        raise SpecError(
            "--root-certificates is of a SuperLink. Give its address, --superlink HOST:PORT, or leave it out."
        )
    for name in ("sampling", "weighting", "early_stop"):
        if getattr(config, name) != getattr(_DEFAULT, name):
            raise SpecError(f"{_option(name)} is not available with --engine flower. Leave it out.")
    config = with_model(config, load(config.dataset, config.data))
    both = {f.name for f in fields(FlowerSettings)} & {f.name for f in fields(TrainConfig)}
    values = {name: getattr(config, name) for name in both}
    values |= {"data": config.data or ""} | own
    settings = FlowerSettings(**values, strategy=strategy_for(config.aggregator), out=str(out.resolve()))
    if not link:
        check(settings)
    RunFolder.start(out, config, settings.resume, config.may_change).close()  # the server of the run holds it
    if link:
        submit(settings, say=say, **link)
        return
    outcome = simulate(settings)
    last = outcome.rounds[-1]
    summary = {"folder": str(out), "rounds": last["round"], "accuracy": last["accuracy"], "loss": last["loss"]}
    word = last.get("scored_by", "Accuracy")
    withheld = sum(not row.get("released", True) for row in outcome.rounds)
    summary |= {"not_released": withheld} if settings.secure_aggregation else {}
    said = f" Rounds whose sum was not released: {withheld}." if withheld else ""
    summary["rejected"] = rejected = turned_away(outcome.rounds)
    said += f" Updates turned away: {listed(rejected)}." if rejected else ""
    stated = Counter[str]()
    for row in outcome.rounds:
        stated.update(row.get("stated", {}))
    summary |= {"stated": dict(stated)} if stated else {}
    said += f" Updates under another defence than the run's, as clients say: {listed(stated)}." if stated else ""
    shared.print_json(summary) if json else typer.echo(f"{word} {last['accuracy']:.4f}.{said} Run folder: {out}")
