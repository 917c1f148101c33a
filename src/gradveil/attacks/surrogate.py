"""Match an update of several local steps at weights between the first and the last: no unrolling (Zhu et al. 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import cast

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, Attack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import BLUR, Matching, cosine_distance, pick
from gradveil.attacks.search.minimisers import Adam
from gradveil.attacks.search.objective import Penalty, TotalVariation, Unknowns
from gradveil.attacks.search.restarts import Search
from gradveil.attacks.search.statistics import SENT, statistics_term
from gradveil.gradients.functional import StepGradient, loss_of, per_problem
from gradveil.ranges import Count, Positive, Weight
from gradveil.tree import Params, parameters
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("surrogate")
@dataclass(frozen=True)
class Surrogate(Attack):
    """Find images whose gradient, at some point between the weights sent and the weights received, has the direction
    of the update (the surrogate model extension of Zhu et al. 2023).

    After many small steps the update points along the gradient somewhere on the way, so that one gradient stands for
    all of them: an evaluation costs the same for two steps and for two hundred. Where on the way is found with the
    images. Departures: total variation and signed steps, as in ``gs``; with Adam the gradient is divided by its size
    first, as the client's was.
    """

    kind = "search"

    steps: Count = 1000  # evaluations per start
    restarts: Count = 1
    lr: Positive = 0.1
    tv: Weight = 1e-4  # images (C, H, W) only
    bn: Weight = SENT  # of batch norm statistics that the client sent
    tol: Weight = 1e-4  # cosine distance at which the update counts as matched

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates at once."""
        search = Search(
            cosine_distance, self._optimiser, self.steps, self.restarts, tol=self.tol, stop=False,
            patience=self.steps, penalties=self._penalties, scaled=False, stack=_stack, own=1,
        )  # fmt: skip
        return [_placed(found) for found in search.run(with_labels(at_one_model(seen), rngs), rngs)]

    def _optimiser(self, unknowns: Unknowns) -> Adam:
        return Adam(self.steps, self.lr, True, True, unknowns.pixels, unknowns.bounds)

    def _penalties(self, seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor) -> tuple[Penalty, ...]:
        smooth = (TotalVariation(self.tv),) if self.tv > 0 and len(unknowns.images) == 4 else ()
        return (*smooth, *statistics_term(seen, owner, self.bn))


def _placed(found: Reconstruction) -> Reconstruction:
    """Name the number that was found beside the images: how far on the way from the first to the last weights."""
    details = {name: value for name, value in found.details.items() if name != "own_0"}
    return replace(found, details=details | {"place": 1 / (1 + exp(min(-found.details["own_0"], 700.0)))})


@dataclass(frozen=True)
class BetweenWeights(Matching):
    """Problems whose gradients are taken between the first and the last weights of each client."""

    drift: Params  # name: (P, *shape), W_before - W_after

    def take(self, rows: Tensor) -> "BetweenWeights":
        """Return the problems at these positions; a position may come more than once."""
        return replace(cast(BetweenWeights, super().take(rows)), drift=pick(self.drift, rows))

    def gradients(self, x: Tensor, y: Tensor, own: Tensor) -> Params:
        """Return the gradients at W_before - sigmoid(own) drift."""
        return self.trial(x, y, own[:, 0], self.drift)  # type: ignore[call-arg]


def _stack(seen: Sequence[Observation]) -> Matching:
    """Return the problems of a group; tensors that an update does not show count as unmoved."""
    plain, one = Matching.of(seen), seen[0].as_one_step()
    start = parameters(one.model)
    sent = [{n: s.update.lr * s.update.gradient[n].to(w) for n, w in start.items() if n in s.visible} for s in seen]
    drift = {n: torch.stack([d.get(n, torch.zeros_like(w)) for d in sent]) for n, w in start.items()}

    def trial(gradient: StepGradient, x: Tensor, y: Tensor, place: Tensor, moved: Params) -> Params:
        at = {n: w - place.sigmoid() * moved[n] for n, w in start.items()}
        found = one.sent(gradient(at, x, y), BLUR)
        return {n: found[n] for n in plain.names}

    many = per_problem(one.model, loss_of(one.model, start, one.loss), trial, randomness=one.randomness)
    return BetweenWeights(plain.model, plain.names, plain.target, plain.weights, plain.floor, many, drift)
