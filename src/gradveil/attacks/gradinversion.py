"""See through gradients (Yin et al. 2021): gradient matching with batch norm statistics and agreeing starts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import (
    Energy,
    GroupConsistency,
    Matching,
    Penalty,
    Unknowns,
    squared_distance,
    statistics_term,
)
from gradveil.attacks.search.restarts import adam_search, image_terms
from gradveil.ranges import Count, Positive, Weight
from gradveil.tree import Params
from gradveil.types import Observation, Reconstruction


@ATTACKS.register("gradinversion")
@dataclass(frozen=True)
class GradInversion(Attack):
    """Minimise the relative squared distance of gradients plus what is known of images (Yin et al. 2021).

    The terms: total variation, size, batch norm statistics close to those that the client sent, else to the model's
    running ones (which the server has, since it made the model), and starts of one update close to their mean.
    Departures: distances are relative to the target's norm and to each layer's variance, so that the weights mean the
    same on every model; the group's mean is taken pixel by pixel, without registration; no noise is added to the steps.
    """

    kind = "search"
    applies_to = (AppliesTo(("image",), steps=(1, 1), signs=True),)

    steps: Count = 1000
    restarts: Count = 4  # the group whose starts must agree
    lr: Positive = 0.1
    tv: Weight | tuple[Weight, ...] = 1e-3  # images (C, H, W) only; of several, one is chosen
    l2: Weight = 1e-5
    bn: Weight = 1e-3
    group: Weight = 1e-2
    tol: Weight = 1e-4  # relative squared distance at which the gradient counts as matched

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        search = adam_search(
            self.steps, self.lr, self.tv, self._terms, False, True, relative_distance,
            restarts=self.restarts, tol=self.tol,
        )  # fmt: skip
        return search.run(with_labels(at_one_model(seen), rngs), rngs)

    def _terms(self, seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor, tv: Tensor) -> tuple[Penalty, ...]:
        terms: list[Penalty] = [Energy(self.l2), *image_terms(0.0)(seen, unknowns, owner, tv)]
        terms += statistics_term(seen, owner, self.bn, running=True)
        if self.restarts > 1:
            terms.append(GroupConsistency(self.group, owner.to(tv.device)))
        return tuple(terms)


def relative_distance(matching: Matching, trial: Params) -> tuple[Tensor, Params]:
    """Return the squared distance over the target's squared norm per problem (P,), and its derivative."""
    values, slopes = squared_distance(matching, trial)
    one = 1 / matching.energy.clamp_min(torch.finfo(values.dtype).tiny)
    return values * one, {n: s * one.view(-1, *([1] * (s.ndim - 1))) for n, s in slopes.items()}
