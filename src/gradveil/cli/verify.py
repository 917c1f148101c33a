"""``gradveil verify``: the promise of a pipeline measured from outside, beside the one that is proved."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradveil.cli import shared
from gradveil.cli.options import Given, Option, Output, takes
from gradveil.errors import SpecError
from gradveil.ranges import Count, Range, Whole, check

if TYPE_CHECKING:
    from gradveil.verification.pipelines import Pipeline
    from gradveil.verification.verify import Verified

EXCEEDED = 1
DEFENSE = "veil:z=1,clip=1"
OWN = "A trainer of your own"


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Output):
    """What is measured, and how closely."""

    dataset: Annotated[str, Option("A data set by name: canaries are of its kind.")] = "digits"
    data: str | None = None
    model: str = ""
    defense: Annotated[str, Option("A defence that promises something of a record.")] = DEFENSE
    engine: Annotated[
        str,
        Option("protect: a training loop; sequential, processes, vectorised: rounds of an engine.", "The run"),
    ] = "protect"
    rounds: Annotated[Count, Option("Releases of each trial.", "The run")] = 2
    lr: Annotated[float, Range(1e-9), Option(panel="The run")] = 0.1
    loss: str = "cross_entropy"
    canaries: Annotated[int, Range(8), Option("Records of a trial, each put in by a coin.")] = 32
    trials: Annotated[int, Range(8), Option("Runs, each with coins and noise of its own.")] = 64
    seeds: Annotated[Whole, Option("Seeds of torch that are tried against one release.")] = 0
    grain: Annotated[
        bool | None, Option("Look for the grain of torch's noise.", "", "where the noise is meant to be secret")
    ] = None
    trainer: Annotated[
        str | None, Option("module:function, train(model, inputs, labels, present) -> what it releases.", OWN)
    ] = None
    mu: Annotated[float | None, Option("μ as it is promised.", OWN)] = None
    sigma: Annotated[float | None, Option("Or the noise multiplier, with --steps.", OWN)] = None
    steps: Annotated[Count | None, Option("How often a record is used.", OWN, "none")] = None
    epsilon: Annotated[float | None, Option("Or ε, at --delta.", OWN)] = None
    delta: Annotated[float, Option("Of ε.", OWN)] = 1e-5
    clip: Annotated[float, Option("The clip, which canaries are made to exceed.", OWN)] = 1.0
    seed: Annotated[int | None, Option("Of canaries and coins.", "", "from the system")] = None
    minutes: Annotated[float | None, Option("Time limit: no trial is begun after it.")] = None
    out: Annotated[Path | None, Option("Write the JSON to this file as well.")] = None


@takes(VerifyOptions, first="defense engine model dataset rounds trials canaries trainer mu minutes out json")
def command(given: Given) -> None:
    """Measure μ with canary records sent through the real pipeline; exit code 1 where it exceeds the promise."""
    from gradveil.auditing.train import TrainConfig, with_model
    from gradveil.data import load
    from gradveil.errors import DataError
    from gradveil.files import write_atomically
    from gradveil.models import fit_to_public
    from gradveil.threats.setup import fitting_model
    from gradveil.verification.pipelines import of_kind
    from gradveil.verification.verify import verify

    asked = given.fill(VerifyOptions())
    check(asked)
    trainer, out, claimed = asked.trainer, asked.out, _claimed(asked)
    if trainer is None and claimed is not None:
        raise SpecError("--mu, --sigma and --epsilon are promises of a --trainer; a defence says its own.")
    if trainer is not None and claimed is None:
        raise SpecError("Say what the trainer promises: --mu, or --sigma with --steps, or --epsilon with --delta.")
    if out is not None and not out.parent.is_dir():
        raise DataError(f"--out: there is no folder {str(out.parent)!r}. Make it first.")
    source = load(asked.dataset, asked.data)
    loss = source.fitting_loss(asked.loss)
    model = asked.model or with_model(TrainConfig(), source).model
    network = fitting_model(model, source, loss, 0)
    like = of_kind(source.train.batch(slice(0, 512)), source.modality)
    fit_to_public(network, source.test.batch(slice(0, 512)).inputs)
    settings = {"rounds": asked.rounds, "lr": asked.lr, "loss": loss, "public": source.test.batch(slice(0, 512))}
    pipeline = _pipeline(asked.defense, asked.engine, settings) if trainer is None else _own(trainer, asked.clip)
    with shared.working(asked.json or asked.quiet, "trial"):
        found = verify(
            pipeline, network, like.inputs, like.labels, mu=claimed, canaries=asked.canaries, trials=asked.trials,
            seeds=asked.seeds, seed=asked.seed, loss=loss, grain=asked.grain, minutes=asked.minutes,
        )  # fmt: skip
    defense = asked.defense if trainer is None else None
    result = {"model": model, "dataset": asked.dataset, "defense": defense, "trainer": trainer} | found.to_json()
    if out is not None:
        from gradveil.auditing.run_folder import plain_json

        write_atomically(out, (json.dumps(plain_json(result), indent=2, ensure_ascii=False) + "\n").encode())
    shared.print_json(result) if asked.json else typer.echo(words(found))
    if found.reasons:
        raise typer.Exit(EXCEEDED)


def _claimed(asked: VerifyOptions) -> float | None:
    """Return the μ that a trainer's owner promises; None where nothing is said."""
    from math import sqrt

    from gradveil.privacy.bounds import mu_of

    mu, sigma, steps, epsilon = asked.mu, asked.sigma, asked.steps, asked.epsilon
    if sum(given is not None for given in (mu, sigma, epsilon)) > 1:
        raise SpecError("--mu, --sigma and --epsilon each say what is promised. Give one of them.")
    if (sigma is None) != (steps is None):
        raise SpecError("--sigma and --steps belong together: μ = √steps / sigma.")
    if any(given is not None and not given > 0 for given in (mu, sigma, epsilon)):
        raise SpecError("--mu, --sigma and --epsilon are numbers above 0.")
    if sigma is not None and steps is not None:
        return sqrt(steps) / sigma
    return mu_of(epsilon, asked.delta) if epsilon is not None else mu


def _own(path: str, clip: float) -> "Pipeline":
    from gradveil.imports import import_object, is_import_path
    from gradveil.verification.pipelines import Foreign

    if not is_import_path(path) or not callable(function := import_object(path)):
        raise SpecError(f"--trainer {path!r}: give module:function, train(model, inputs, labels, present).")
    return Foreign(function, clip=clip, name=path)


def _pipeline(defense: str, engine: str, settings: dict[str, Any]) -> "Pipeline":
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
