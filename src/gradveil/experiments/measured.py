"""What a promise is measured to be, beside what is proved of it: a short ``verify`` of a run's own defence."""

from typing import Any

from torch import nn

from gradveil.defenses.base import Defense
from gradveil.errors import GradveilError
from gradveil.measured.pipelines import Federated, OfDefense, Protected
from gradveil.measured.verify import Measured, verify
from gradveil.types import Batch

TRIALS = 32  # with 32 canaries each: some seconds, and an interval of about ±0.13 at μ = 1
SAYS = (
    "Canary records were put in or left out by coins, in one step of a simulated client at the weights that training "
    "begins with; directions of other records, other weights and channels beside the updates are not looked at."
)


def measure(
    defense: Defense, model: nn.Module, like: Batch, public: Batch | None, loss: str, lr: float, seed: int
) -> Measured:
    """Return μ of one release under a defence as a run has planned it, measured at these weights.

    Of a cohort's sum, one client's records with the noise of the whole sum are looked at.
    """
    alone = defense.alone() if defense.fewest else defense
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
    if defense.spends(1) is None:
        return {}
    try:
        found = measure(defense, model, like, public, loss, lr, seed)
    except GradveilError as error:
        return {"why": " ".join(str(error).split())[:200]}
    e = found.estimate
    numbers = {"mu_proved": found.promised, "mu_measured": e.mu, "low": e.low, "high": e.high}
    return numbers | {"verdict": found.verdict, "reasons": found.reasons}


def in_words(found: dict[str, Any]) -> str:
    """Return one sentence on these figures."""
    if "why" in found:
        return f"Not measured: {found['why']}"
    numbers = f"μ = {found['mu_measured']:.2g} [{found['low']:.2g}, {found['high']:.2g}]"
    return f"{numbers} measured of one release, {found['mu_proved']:.2g} proved: {found['verdict']}."
