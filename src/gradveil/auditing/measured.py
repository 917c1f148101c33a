"""What a promise is measured to be, beside what is proved of it: a short ``verify`` of a run's own defence."""

from dataclasses import replace
from typing import Any

from torch import nn

from gradveil.auditing.settings import find_device
from gradveil.auditing.train import FIT, TrainConfig, with_model
from gradveil.data import load
from gradveil.data.partition import deal
from gradveil.errors import GradveilError
from gradveil.federated.ledger import planned_run
from gradveil.federated.simulate import public_records
from gradveil.models import fit_to_public
from gradveil.protection.defense import Defense, accounted, build
from gradveil.seeds import Seeds
from gradveil.threats.setup import fitting_model
from gradveil.types import Batch
from gradveil.verification.pipelines import Federated, OfDefense, Protected
from gradveil.verification.verify import Verified, verify

TRIALS = 32  # with 32 canaries each: some seconds, and an interval of about ±0.13 at μ = 1
SAYS = (
    "Canary records were put in or left out by coins, in one step of a simulated client at the weights that training "
    "begins with; directions of other records, other weights and channels beside the updates are not looked at."
)


def measure(
    defense: Defense, model: nn.Module, like: Batch, public: Batch | None, loss: str, lr: float, seed: int
) -> Verified:
    """Return μ of one release under a defence as a run has planned it, measured at these weights.

    Of a cohort's sum, one client's records with the noise of the whole sum are looked at.
    """
    alone = accounted(defense).single_client() if accounted(defense).min_clients else defense
    pipeline: OfDefense
    if like.inputs.is_floating_point():
        pipeline = Federated(alone, loss=loss, public=public, rounds=1, lr=lr, seed=seed)
    else:
        pipeline = Protected(alone, loss=loss, public=public, rounds=1, lr=lr)
    return verify(pipeline, model, like.inputs, like.labels, trials=TRIALS, seed=seed, loss=loss, grain=False)


def figures(
    defense: Defense, model: nn.Module, like: Batch, public: Batch | None, loss: str, lr: float, seed: int
) -> dict[str, Any]:
    """Return the measured μ and its interval for a row; empty where nothing is promised, and why where it failed."""
    if accounted(defense).cost(1) is None:
        return {}
    try:
        found = measure(defense, model, like, public, loss, lr, seed)
    except (GradveilError, RuntimeError, ValueError) as error:  # what cannot be measured stops no run
        return {"why": " ".join(str(error).split())[:200]}
    e = found.estimate
    numbers = {"mu_proved": found.promised, "mu_measured": e.mu, "low": e.low, "high": e.high}
    return numbers | {"verdict": found.verdict, "reasons": found.reasons}


def of_run(config: TrainConfig) -> dict[str, Any]:
    """Return the figures of a training run before it begins: of its defence with the noise that its plan needs."""
    dataset = load(config.dataset, config.data)
    config = replace(with_model(config, dataset), loss=dataset.fitting_loss(config.loss))
    seeds, defense = Seeds(config.seed), build(config.defense)
    clients = deal(dataset, config.partition, seeds("partition"))
    model = fitting_model(config.model, dataset, config.loss, config.seed, config.trains).to(find_device(config.device))
    public = public_records(dataset, clients, seeds, FIT)
    some = dataset.train.batch(public) if len(public) else dataset.test.batch(slice(0, FIT))
    fit_to_public(model, some.inputs)
    first = next(model.parameters())
    some = Batch(some.inputs.to(first.device), some.labels.to(first.device))
    planned = accounted(defense).for_run(planned_run(seeds, clients, config, defense))
    return figures(planned, model, some, some, config.loss, config.lr_of(1), config.seed)


def in_words(found: dict[str, Any]) -> str:
    """Return one sentence on these figures."""
    if "why" in found:
        return f"Not measured: {found['why']}"
    numbers = f"μ = {found['mu_measured']:.2g} [{found['low']:.2g}, {found['high']:.2g}]"
    return f"{numbers} measured of one release, {found['mu_proved']:.2g} proved: {found['verdict']}."
