"""``gradveil verify``: the promise of a pipeline measured from outside, beside the one that is proved."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gradveil.cli import shared
from gradveil.errors import SpecError

if TYPE_CHECKING:
    from gradveil.verification.pipelines import Pipeline
    from gradveil.verification.verify import Verified

EXCEEDED = 1
DEFENSE = "veil:z=1,clip=1"
own = partial(typer.Option, rich_help_panel="A trainer of your own")


def command(
    dataset: str = typer.Option("digits", help="A data set by name: canaries are of its kind."),
    data: shared.Data = None,
    model: str = typer.Option("", show_default=shared.SUITS, help=f"A model spec, {shared.OWN}"),
    defense: str = typer.Option(DEFENSE, help="A defence that promises something of a record."),
    engine: str = typer.Option(
        "protect", help="protect: a training loop; sequential, processes, vectorised, flower: rounds of an engine."
    ),
    rounds: int = typer.Option(2, min=1, help="Releases of each trial."),
    lr: float = typer.Option(0.1, min=1e-9, help="Learning rate of the local steps."),
    loss: shared.Loss = "cross_entropy",
    canaries: int = typer.Option(32, min=8, help="Records of a trial, each put in by a coin."),
    trials: int = typer.Option(64, min=8, help="Runs, each with coins and noise of its own."),
    seeds: int = typer.Option(0, min=0, help="Seeds of torch that are tried against one release."),
    grain: bool = typer.Option(
        None,
        "--grain/--no-grain",
        show_default="where the noise is meant to be secret",
        help="Look for the grain of torch's noise.",
    ),
    trainer: str = own(None, help="module:function, train(model, inputs, labels, present) -> what it releases."),
    mu: float = own(None, help="μ as it is promised."),
    sigma: float = own(None, help="Or the noise multiplier, with --steps."),
    steps: int = own(None, min=1, help="How often a record is used."),
    epsilon: float = own(None, help="Or ε, at --delta."),
    delta: float = own(1e-5, help="Of ε."),
    clip: float = own(1.0, help="The clip, which canaries are made to exceed."),
    seed: int = typer.Option(None, show_default="from the system", help="Of canaries and coins."),
    minutes: float = typer.Option(None, help="Time limit: no trial is begun after it."),
    out: Path = typer.Option(None, help="Write the JSON to this file as well."),
    json: shared.Json = False,
    quiet: shared.Quiet = False,
) -> None:
    """Measure μ with canary records sent through the real pipeline; exit code 1 where it exceeds the promise."""
    from gradveil.auditing.train import TrainConfig, with_model
    from gradveil.data import load
    from gradveil.errors import DataError
    from gradveil.files import write_atomically
    from gradveil.models import fit_to_public
    from gradveil.threats.setup import fitting_model
    from gradveil.verification.verify import verify

    claimed = _claimed(mu, sigma, steps, epsilon, delta)
    if trainer is None and claimed is not None:
        raise SpecError("--mu, --sigma and --epsilon are promises of a --trainer; a defence says its own.")
    if trainer is not None and claimed is None:
        raise SpecError("Say what the trainer promises: --mu, or --sigma with --steps, or --epsilon with --delta.")
    if out is not None and not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {str(out.parent)!r}. Make it first.")
    source = load(dataset, data)
    loss = source.fitting_loss(loss)
    model = model or with_model(TrainConfig(), source).model
    network = fitting_model(model, source, loss, 0)
    like = source.train.batch(slice(0, 512))
    fit_to_public(network, source.test.batch(slice(0, 512)).inputs)
    settings = {"rounds": rounds, "lr": lr, "loss": loss, "public": source.test.batch(slice(0, 512))}
    pipeline = _own(trainer, clip) if trainer is not None else _pipeline(defense, engine, settings)
    with shared.working(json or quiet, "trial"):
        found = verify(
            pipeline, network, like.inputs, like.labels, mu=claimed, canaries=canaries, trials=trials, seeds=seeds,
            seed=seed, loss=loss, grain=grain, minutes=minutes,
        )  # fmt: skip
    about = {"model": model, "dataset": dataset, "defense": defense if trainer is None else None, "trainer": trainer}
    result = about | found.to_json()
    if out is not None:
        import json as json_

        from gradveil.auditing.run_folder import plain_json

        write_atomically(out, (json_.dumps(plain_json(result), indent=2, ensure_ascii=False) + "\n").encode())
    shared.print_json(result) if json else typer.echo(words(found))
    if found.reasons:
        raise typer.Exit(EXCEEDED)


def _claimed(
    mu: float | None, sigma: float | None, steps: int | None, epsilon: float | None, delta: float
) -> float | None:
    """Return the μ that a trainer's owner promises; None where nothing is said."""
    from math import sqrt

    from gradveil.privacy.accountant import mu_of

    if sum(given is not None for given in (mu, sigma, epsilon)) > 1:
        raise SpecError("--mu, --sigma and --epsilon each say what is promised. Give one of them.")
    if (sigma is None) != (steps is None):
        raise SpecError("--sigma and --steps belong together: μ = √steps / sigma.")
    if any(given is not None and not given > 0 for given in (mu, sigma, epsilon)):
        raise SpecError("--mu, --sigma and --epsilon are numbers above 0.")
    if sigma is not None and steps is not None:
        return sqrt(steps) / sigma
    return mu_of(epsilon, delta) if epsilon is not None else mu


def _own(path: str, clip: float) -> "Pipeline":
    from gradveil.imports import import_object, is_import_path
    from gradveil.verification.pipelines import Foreign

    if not is_import_path(path) or not callable(function := import_object(path)):
        raise SpecError(f"--trainer {path!r}: give module:function, train(model, inputs, labels, present).")
    return Foreign(function, clip_=clip, name=path)


def _pipeline(defense: str, engine: str, settings: dict[str, Any]) -> "Pipeline":
    if engine.partition(":")[0] == "flower":
        from gradveil.integrations.flower.verify import OnFlower
        from gradveil.protection.defense import build

        return OnFlower(build(defense), **settings)
    from gradveil.verification.pipelines import of_spec

    return of_spec(defense, engine, **settings)


def words(found: "Verified") -> str:
    """Return a few lines of plain words."""
    e, guessed = found.estimate, found.guessed
    lines = [
        f"{found.pipeline}: {found.trials} trials of {found.canaries} canary slots, {found.releases} releases each.",
        f"proved       μ = {found.promised:.3g}",
        f"measured     μ = {e.mu:.3g} [{e.low:.3g}, {e.high:.3g}] at {e.confidence:.1%}",
        f"worst record μ at least {e.worst_low:.3g}, of all {found.canaries} at once",
        f"guesses      {guessed.right} of {guessed.made} coins right: μ at least {found.guess_low:.3g}, whatever the "
        "law of the noise",
    ]
    looked = []
    if found.seeds:
        looked.append(f"{found.seeds:,} seeds tried, " + ("none fits" if found.seed is None else "one fits"))
    if found.grain is not None:
        looked.append(f"grain {found.grain:.1f}")
    if found.reused is not None:
        looked.append(f"shared noise {found.reused:.1f}")
    lines += [f"noise        {', '.join(looked)} (standard deviations; above 6 is found)"] if looked else []
    lines += ["", f"{found.verdict[:1].upper()}{found.verdict[1:]}" + (":" if found.reasons else ".")]
    lines += [f"- {reason}." for reason in found.reasons]
    if found.verdict == "says little":
        lines.append("The canaries are not sharp here: their gradients are shorter than the clip, or the server sees")
        lines.append("less than the promise allows for. A sound pipeline and a broken one may look alike.")
    return "\n".join(lines)
