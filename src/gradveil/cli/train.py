"""``gradveil train``: federated averaging with any defence inside."""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import typer

from gradveil.cli import shared
from gradveil.errors import SpecError
from gradveil.experiments.run_folder import Row, RunFolder
from gradveil.experiments.train import TrainConfig, train
from gradveil.registry import convert

averaging = partial(typer.Option, rich_help_panel="Federated averaging")
of_run = partial(typer.Option, rich_help_panel="The run")
flower = partial(typer.Option, rich_help_panel="On Flower")
_DEFAULT = TrainConfig()


def command(
    model: shared.Model = _DEFAULT.model,
    dataset: str = typer.Option(_DEFAULT.dataset, help="A data set by name, or module:function that makes your own."),
    data: shared.Data = None,
    defense: str = typer.Option("none", help="A defence spec; join several by '+'."),
    seed: shared.Seed = 0,
    out: Path = typer.Option(Path("runs/train"), help="The run folder."),
    json: shared.Json = False,
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
    faults: str = averaging("", help="Fault drill: chances of drop=, late=, nan=, inf=, shape=."),
    engine: str = of_run("auto", help="auto, sequential, processes:workers=N, vectorised, flower."),
    device: shared.Device = "auto",
    early_stop: int = of_run(None, min=1, help="End after so many measurements without a higher accuracy."),
    evaluate_every: int = of_run(1, min=1, help="Rounds between measurements."),
    save_every: int = of_run(1, min=1, help="Rounds between checkpoints."),
    tensorboard: bool = of_run(False, help="Write event files for TensorBoard as well."),
    superlink: str = flower(None, help="host:port of a running SuperLink."),
    root_certificates: Path = flower(None, help="Of a SuperLink with TLS."),
    secure_aggregation: bool = flower(False, "--secure-aggregation", help="The server sees sums of updates only."),
    lost: float = flower(0.0, help="Share of a secure sum's clients that may drop out."),
    devices: int = typer.Option(None, hidden=True),
    server: str = typer.Option(None, hidden=True),
) -> None:
    """Train with federated averaging (default: digits, a small LeNet, no defence)."""
    clients = shared.renamed("--devices", devices, "--clients", clients)
    aggregator = shared.renamed("--server", server, "--aggregator", aggregator)
    given = locals()
    types = {f.name: f.type for f in fields(TrainConfig)}
    values = {name: given[name] for name in types}
    for name in ("sampling", "weighting"):
        values[name] = convert(values[name], types[name], f"--{name}")
    config = TrainConfig(**values | {"batch_size": batch_size or None})
    if engine.partition(":")[0] == "flower":
        if resume:
            raise SpecError("--resume is not available with --engine flower. Leave it out.")
        _train_on_flower(config, out, superlink, root_certificates, json, secure_aggregation, lost)
        return
    if superlink or root_certificates or secure_aggregation or lost:
        raise SpecError("--superlink, --root-certificates, --secure-aggregation, --lost belong to --engine flower.")
    with shared.running(json, shared.resume_with(out)) as display:

        def advance(row: Row) -> None:
            word = row.get("scored_by", "accuracy")
            note = f"{word} {row['accuracy']:.4f}" if "accuracy" in row else ""
            display("training", row["round"], rounds, note)

        summary = train(config, out, resume=resume, tensorboard=tensorboard, progress=advance)
    _show(summary, json)


def _show(summary: dict[str, Any], json: bool) -> None:
    if json:
        shared.print_json(summary)
        return
    turned_away = ", ".join(f"{count} {reason}" for reason, count in summary["rejected"].items())
    early = ", stopped early" if summary["stopped_early"] else ""
    word = summary["scored_by"][:1].upper() + summary["scored_by"][1:]
    typer.echo(f"{word} {summary['accuracy']:.4f} after {summary['rounds']} rounds{early}.")
    typer.echo(f"Best {summary['best_accuracy']:.4f} in round {summary['best_round']}.")
    if turned_away:
        typer.echo(f"Updates turned away: {turned_away}.")
    if (bought := summary.get("bought")) is not None:
        tier = "each update" if bought["tier"] == "local" else "the sum of a round alone"
        typer.echo(
            f"Bought over the run, for the client that took part most, against a server that sees {tier}: z_run = "
            f"{bought['z_run']:.3g}, ε = {bought['epsilon']:.3g} at δ = {bought['delta']:g}; a guess of chance "
            f"{bought['blind_guess']:g} becomes at most {bought['guess']:.2g}. Simulated: the noise is the seed's."
        )
    typer.echo(f"Run folder: {summary['folder']}")


def _train_on_flower(
    config: TrainConfig,
    out: Path,
    superlink: str | None,
    certificates: Path | None,
    json: bool,
    secure_aggregation: bool,
    lost: float,
) -> None:
    """Hand the run to Flower: simulated here, or submitted to a SuperLink."""
    from gradveil.integrations.flower.engine import check, run
    from gradveil.integrations.flower.settings import FlowerSettings, strategy_for

    for name in ("faults", "sampling", "weighting", "early_stop"):
        if getattr(config, name) != getattr(_DEFAULT, name):
            raise SpecError(f"--{name.replace('_', '-')} is not available with --engine flower. Leave it out.")
    both = {f.name for f in fields(FlowerSettings)} & {f.name for f in fields(TrainConfig)}
    values = {name: getattr(config, name) for name in both}
    values |= {"data": config.data or "", "secure_aggregation": secure_aggregation, "lost": lost}
    settings = FlowerSettings(**values, strategy=strategy_for(config.aggregator), out=str(out.resolve()))
    if superlink is None:
        check(settings)
    RunFolder.start(out, config).close()  # the server of the run holds it
    outcome = run(settings, superlink=superlink, root_certificates=certificates, say=typer.echo)
    if outcome is None:
        return
    last = outcome.rounds[-1]
    summary = {"folder": str(out), "rounds": last["round"], "accuracy": last["accuracy"], "loss": last["loss"]}
    word = last.get("scored_by", "Accuracy")
    withheld = sum(not row.get("released", True) for row in outcome.rounds)
    summary |= {"not_released": withheld} if secure_aggregation else {}
    said = f" Rounds whose sum was not released: {withheld}." if withheld else ""
    shared.print_json(summary) if json else typer.echo(f"{word} {last['accuracy']:.4f}.{said} Run folder: {out}")
