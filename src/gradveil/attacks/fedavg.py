"""Unroll the client's local steps and match the whole weight difference: what an update of FedAvg needs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from operator import attrgetter
from typing import Literal, cast

import torch
from torch import Generator, Tensor

from gradveil import tree
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_seen, in_groups
from gradveil.attacks.labels import unreadable, with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import BLUR, SENT, Matching, pick, squared_distance
from gradveil.attacks.search.minimise import LBFGS
from gradveil.attacks.search.restarts import Search, adam_search, image_terms
from gradveil.gradients.functional import StepGradient, local_plan, loss_of, per_problem, trial_updates
from gradveil.losses import CrossEntropy
from gradveil.ranges import Count, Positive, Weight
from gradveil.step_rule import PLAIN
from gradveil.tree import Params, parameters
from gradveil.types import Observation, Reconstruction, check_update


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
    applies_to = (AppliesTo(steps=(2, inf), signs=True, default="steps=400", turn=3),)

    steps: Count = 1000  # evaluations per start
    restarts: Count = 1
    lr: Positive = 0.1
    tv: Weight | tuple[Weight, ...] = 1e-4  # images (C, H, W) only; of several, one is chosen
    bn: Weight = SENT  # of batch norm statistics that the client sent
    tol: Weight = 1e-4  # cosine distance at which the update counts as matched

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        search = adam_search(
            self.steps, self.lr, self.tv, image_terms(self.bn), True, restarts=self.restarts, tol=self.tol,
            stack=_stack, own=1,
        )  # fmt: skip
        found = search.run(with_labels(at_one_model(seen), rngs), rngs)
        for one in found:  # how far on the way from the first to the last weights
            one.details["place"] = 1 / (1 + exp(min(-one.details.pop("own_0"), 700.0)))
        return found


@dataclass(frozen=True)
class BetweenWeights(Matching):
    """Problems whose gradients are taken between the first and the last weights of each client."""

    drift: Params  # name: (P, *shape), W_before - W_after

    def take(self, rows: Tensor) -> "BetweenWeights":
        return replace(cast(BetweenWeights, super().take(rows)), drift=pick(self.drift, rows))

    def gradients(self, x: Tensor, y: Tensor, own: Tensor) -> Params:
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
    applies_to = (AppliesTo(steps=(2, 16), signs=True, default="steps=400", turn=4), AppliesTo(signs=True))

    steps: Count = 1000  # evaluations per start
    restarts: Count = 1
    optimiser: Literal["adam", "lbfgs"] = "adam"
    lr: Positive = 0.1  # of Adam
    tv: Weight | tuple[Weight, ...] = 1e-4  # with Adam; images (C, H, W) only; of several, one is chosen
    bn: Weight = SENT  # with Adam; of batch norm statistics that the client sent
    history: Count = 50  # of L-BFGS
    tol: Weight = 1e-6  # of the squared norm with L-BFGS; the cosine distance with Adam

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return in_groups(ready_to_unroll(seen, rngs), rngs, local_training, self._search().run)

    def _search(self) -> Search:
        if self.optimiser == "lbfgs":
            return Search(
                squared_distance, lambda *_: LBFGS(self.history, True), self.steps, self.restarts, tol=self.tol,
                stack=unrolled_stack,
            )  # fmt: skip
        return adam_search(
            self.steps, self.lr, self.tv, image_terms(self.bn), True, restarts=self.restarts, tol=self.tol,
            stack=unrolled_stack,
        )  # fmt: skip


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
    """Return the problems of a group with the local steps, where there are several, unrolled in their trials."""
    share = 1 / seen[0].update.num_steps
    if share == 1:
        return Matching.of(seen)
    check_seen(seen)
    means = [replace(s.update, gradient=tree.scale(s.update.gradient, share), num_steps=1, rule=PLAIN) for s in seen]
    plain = Matching.of([replace(s, simulate=None, update=mean) for s, mean in zip(seen, means, strict=True)])
    whole = trial_updates(seen[0], plain.names, BLUR)
    return replace(plain, trial=lambda x, y: tree.scale(whole(x, y), share))
