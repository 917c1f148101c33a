"""``gradveil train``: federated averaging with any defence inside."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import typer

from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.auditing.train import TrainConfig, listed, train, turned_away, with_model
from gradveil.cli import shared
from gradveil.errors import SpecError
from gradveil.protection.defense import build
from gradveil.registry import convert

averaging = partial(typer.Option, rich_help_panel="Federated averaging")
of_run = partial(typer.Option, rich_help_panel="The run")
flower = partial(typer.Option, rich_help_panel="On Flower")
_DEFAULT = TrainConfig()
ON_FLOWER = (  # its own settings
    "secure_aggregation", "lost", "max_change", "max_examples", "require_defense", "deadline", "min_replies",
)  # fmt: skip


def command(
    model: str = typer.Option("", show_default=shared.SUITS, help=f"A model spec, {shared.OWN}"),
    dataset: str = typer.Option(_DEFAULT.dataset, help="A data set by name, a CSV or parquet file, or your own."),
    data: shared.Data = None,
    target: shared.Target = None,  # type: ignore[assignment]
    categorical: shared.Categorical = None,  # type: ignore[assignment]
    drop: shared.Drop = None,  # type: ignore[assignment]
    by: shared.By = None,  # type: ignore[assignment]
    defense: str = typer.Option("none", help="A defence spec; join several by '+'."),
    seed: shared.Seed = 0,
    out: Path = typer.Option(Path("runs/train"), help="The run folder."),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
    resume: bool = typer.Option(False, "--resume", help="Continue a run that was stopped, or add rounds to it."),
    partition: str = averaging(_DEFAULT.partition, help="How examples are dealt out."),
    rounds: int = averaging(_DEFAULT.rounds, min=1, help="Rounds of training."),
    clients: int = averaging(_DEFAULT.clients, help="Clients that train in a round."),
    epochs: int = averaging(_DEFAULT.epochs, help="Local epochs."),
    batch_size: int = averaging(_DEFAULT.batch_size, help="Examples of a local step; 0: all of them."),
    lr: float = averaging(_DEFAULT.lr, help="Learning rate of the local steps."),
    schedule: str = averaging("constant", help="constant, cosine, exponential:factor=, inverse:mu=,gamma=."),
    sampling: str = averaging("without", help="Draw clients with or without putting back."),
    weighting: str = averaging("samples", help="samples, paper or uniform."),
    aggregator: str = averaging("fedavg", help="fedavg, fedavgm, fedadam; on Flower: a strategy."),
    loss: shared.Loss = "cross_entropy",
    optimizer: shared.Optimizer = "sgd",
    momentum: shared.Momentum = 0.0,
    weight_decay: shared.WeightDecay = 0.0,
    proximal: shared.Proximal = 0.0,
    clip: shared.Clip = 0.0,
    trains: shared.Trains = "all",
    faults: str = averaging("", help="Fault drill: chances of drop=, late=, nan=, inf=, shape=."),
    engine: str = of_run("auto", help="auto, sequential, processes:workers=N, vectorised, flower."),
    device: shared.Device = "auto",
    early_stop: int = of_run(None, min=1, help="End after so many measurements without a higher accuracy."),
    evaluate_every: int = of_run(1, min=1, help="Rounds between measurements."),
    save_every: int = of_run(1, min=1, help="Rounds between checkpoints."),
    tensorboard: bool = of_run(False, help="Write event files for TensorBoard as well."),
    verify: bool = of_run(False, "--verify", help="Measure the defence's promise with canary records, too."),
    superlink: str = flower(None, help="host:port of a running SuperLink."),
    root_certificates: Path = flower(None, help="Of a SuperLink with TLS."),
    secure_aggregation: bool = flower(None, "--secure-aggregation", help="The server sees sums of updates only."),
    lost: float = flower(None, show_default="0", help="Share of a secure sum's clients that may drop out."),
    max_change: float = flower(
        None, show_default="10", help="Refuse a change above so many times the round's median; 0: none."
    ),
    max_examples: int = flower(None, show_default="the largest device's", help="Refuse a reply that counts more."),
    deadline: float = flower(None, show_default="600", help="Seconds a round waits for nodes, then for replies."),
    min_replies: int = flower(None, show_default="1", help="Sound replies that a round needs."),
    require_defense: str = flower(None, help="Refuse replies that do not say that this was done."),
    devices: int = typer.Option(None, hidden=True),
    server: str = typer.Option(None, hidden=True),
) -> None:
    """Train with federated averaging (default: digits, a small LeNet, no defence)."""
    clients = shared.renamed("--devices", devices, "--clients", clients)
    aggregator = shared.renamed("--server", server, "--aggregator", aggregator)
    dataset = shared.table_spec(dataset, target, categorical, drop, by) or dataset
    partition = shared.NATURAL if by and partition == _DEFAULT.partition else partition
    given = locals()
    types = {f.name: f.type for f in fields(TrainConfig)}
    values = {name: given[name] for name in types}
    for name in ("sampling", "weighting"):
        values[name] = convert(values[name], types[name], f"--{name}")
    config = TrainConfig(**values | {"batch_size": batch_size or None})
    own = {name: given[name] for name in ON_FLOWER if given[name] is not None}
    if engine.partition(":")[0] == "flower":
        if verify:
            raise SpecError("--verify is not available with --engine flower: use gradveil verify --engine flower.")
        say = (lambda line: None) if json or quiet else partial(typer.echo, err=True)
        _train_on_flower(config, out, superlink, root_certificates, json, say, own | {"resume": resume})
        return
    if verify and "records" not in build(defense).acts_on:
        raise SpecError("--verify measures what a defence promises of a record: give one that does, e.g. veil.")
    if superlink or root_certificates or own:
        options = ("superlink", "root_certificates", *ON_FLOWER)
        raise SpecError(f"{', '.join(map(_option, options))} belong to --engine flower.")
    with shared.running(json or quiet, shared.resume_with(out)) as display:

        def advance(row: Row) -> None:
            word = row.get("scored_by", "accuracy")
            note = f"{word} {row['accuracy']:.4f}" if "accuracy" in row else ""
            display("training", row["round"], rounds, note)

        summary = train(config, out, resume=resume, tensorboard=tensorboard, progress=advance)
        summary |= _measured(config) if verify else {}
    _show(summary, json)


def _measured(config: TrainConfig) -> dict[str, Any]:
    """Return what canary records say of the run's promise."""
    from gradveil.auditing.measured import of_run

    return {"measured": of_run(config)}


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
        from gradveil.auditing.measured import in_words

        typer.echo(in_words(found))
    typer.echo(f"Run folder: {summary['folder']}")


def _train_on_flower(
    config: TrainConfig,
    out: Path,
    superlink: str | None,
    certificates: Path | None,
    json: bool,
    say: Callable[[str], None],
    own: dict[str, Any],
) -> None:
    """Hand the run to Flower: simulated here, or submitted to a SuperLink."""
    from gradveil.data import load
    from gradveil.integrations.flower.engine import check, run
    from gradveil.integrations.flower.settings import FlowerSettings, strategy_for

    for name in ("faults", "sampling", "weighting", "early_stop"):
        if getattr(config, name) != getattr(_DEFAULT, name):
            raise SpecError(f"{_option(name)} is not available with --engine flower. Leave it out.")
    config = with_model(config, load(config.dataset, config.data))
    both = {f.name for f in fields(FlowerSettings)} & {f.name for f in fields(TrainConfig)}
    values = {name: getattr(config, name) for name in both}
    values |= {"data": config.data or ""} | own
    settings = FlowerSettings(**values, strategy=strategy_for(config.aggregator), out=str(out.resolve()))
    if superlink is None:
        check(settings)
    RunFolder.start(out, config, settings.resume, config.may_change).close()  # the server of the run holds it
    outcome = run(settings, superlink=superlink, root_certificates=certificates, say=say)
    if outcome is None:
        return
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
