"""Unroll the client's local steps and match the whole weight difference: what an update of FedAvg needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

import torch
from torch import Generator, Tensor

from gradveil import tree
from gradveil.attacks.base import ATTACKS, Attack, check_seen, in_groups
from gradveil.attacks.labels import unreadable, with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.loop import Optimiser
from gradveil.attacks.search.matching import BLUR, Matching, cosine_distance, squared_distance
from gradveil.attacks.search.minimisers import LBFGS, Adam
from gradveil.attacks.search.objective import Penalty, TotalVariation, Unknowns
from gradveil.attacks.search.restarts import Search
from gradveil.attacks.search.statistics import SENT, statistics_term
from gradveil.gradients.functional import local_plan, trial_updates
from gradveil.losses import CrossEntropy
from gradveil.ranges import Count, Positive, Weight
from gradveil.step_rule import PLAIN
from gradveil.tree import Params
from gradveil.types import Observation, Reconstruction, Update, check_update


@ATTACKS.register("fedavg")
@dataclass(frozen=True)
class FedAvgInversion(Attack):
    """Run the client's local steps on trial images, all N at once, and match the weight difference they end in.

    Steps, learning rate, batch size and optimiser are the server's own settings. Which example was in which batch is
    not known: one fixed ordering is unrolled (see ``fedavg_unroll``). Labels the server knows are taken in their
    order; labels read off the update are dealt out to the batches evenly, as a shuffle does on average; targets of a
    loss that shows none are searched as well. ``adam`` minimises the cosine distance with total variation (Geiping et
    al. 2020, section 6), ``lbfgs`` the squared distance.
    """

    kind = "search"

    steps: Count = 1000  # evaluations per start
    restarts: Count = 1
    optimiser: Literal["adam", "lbfgs"] = "adam"
    lr: Positive = 0.1  # of Adam
    tv: Weight = 1e-4  # with Adam; images (C, H, W) only
    bn: Weight = SENT  # with Adam; of batch norm statistics that the client sent
    history: Count = 50  # of L-BFGS
    tol: Weight = 1e-6  # of the squared norm with L-BFGS; the cosine distance with Adam

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Rebuild the inputs behind several updates; those with the same local training go together."""
        return in_groups(ready_to_unroll(seen, rngs), rngs, local_training, self._search().run)

    def _search(self) -> Search:
        if self.optimiser == "lbfgs":
            return Search(
                squared_distance, self._optimiser, self.steps, self.restarts, tol=self.tol, stack=unrolled_stack
            )  # fmt: skip
        return Search(
            cosine_distance, self._optimiser, self.steps, self.restarts, tol=self.tol, stop=False, patience=self.steps,
            penalties=self._penalties, scaled=False, stack=unrolled_stack,
        )  # fmt: skip

    def _optimiser(self, unknowns: Unknowns) -> Optimiser:
        if self.optimiser == "lbfgs":
            return LBFGS(self.history, True)
        return Adam(self.steps, self.lr, True, True, unknowns.pixels, unknowns.bounds)

    def _penalties(self, seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor) -> tuple[Penalty, ...]:
        smooth = (TotalVariation(self.tv),) if self.tv > 0 and len(unknowns.images) == 4 else ()
        return (*smooth, *statistics_term(seen, owner, self.bn))


local_training = attrgetter("update.num_steps", "update.lr", "update.batch_size", "update.rule")


def ready_to_unroll(seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Observation]:
    """Return the observations with the labels that can be read, dealt out to the batches of the local steps."""
    seen = at_one_model(seen)
    for s in seen:
        check_update(s.update, s.model)
        local_plan(s.update)
    labelled = with_labels(seen, rngs)
    for s in labelled:
        if s.labels is None and isinstance(s.loss, CrossEntropy):
            raise unreadable(s)
    return [
        s if given.labels is not None or s.labels is None else replace(s, labels=_dealt(s))
        for given, s in zip(seen, labelled, strict=True)
    ]


def _dealt(seen: Observation) -> Tensor:
    """Return the labels in an order that gives every batch its part of each class."""
    assert seen.labels is not None
    count = len(local_plan(seen.update)[0])
    order = torch.cat([torch.arange(b, seen.num_examples, count) for b in range(count)])
    return seen.labels[order.to(seen.labels.device)]


def unrolled_stack(seen: Sequence[Observation]) -> Matching:
    """Return the problems of a group with the local steps unrolled in their trial gradients."""
    check_seen(seen)
    plain = Matching.of([replace(s, simulate=None, update=_mean_step(s.update)) for s in seen])
    return replace(plain, trial=_unrolled(seen[0], plain.names))


def _mean_step(update: Update) -> Update:
    return replace(update, gradient=tree.scale(update.gradient, 1 / update.num_steps), num_steps=1, rule=PLAIN)


def _unrolled(seen: Observation, names: tuple[str, ...]) -> Callable[[Tensor, Tensor], Params]:
    """Return x (P, N, *shape), y (P, N, K) -> the mean direction of the local steps, per problem."""
    whole = trial_updates(seen, names, BLUR)
    return lambda x, y: tree.scale(whole(x, y), 1 / seen.update.num_steps)
