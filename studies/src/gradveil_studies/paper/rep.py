"""Match class-wise representations instead of gradients: the paper's "Rep" (Sun et al. 2020, section 3.3)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, check_alone, check_seen, refuse_adaptive
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import at_one_model
from gradveil.attacks.search.matching import Matching, squared_distance
from gradveil.attacks.search.minimise import LBFGS
from gradveil.attacks.search.restarts import Search
from gradveil.errors import AttackError, did_you_mean
from gradveil.gradients.functional import quiet
from gradveil.modules import prefix
from gradveil.ranges import Count, Positive, Weight
from gradveil.registry import describe
from gradveil.tree import Params, named
from gradveil.types import Observation, Reconstruction
from gradveil_studies.paper.inference import InferenceSettings, chain_of, infer

FAINT = 1e-6  # of the largest bias gradient: below it a quotient is 0/0


@ATTACKS.register("rep")
@dataclass(frozen=True)
class Rep(Attack):
    """Infer each class's mean representation r̂ and minimise Σ_c ||mean of f(x̂) over class c - r̂_c||² by L-BFGS.

    r̂_c = ∇W_c / ∇b_c in the last fully connected layer; in an earlier one, the rows that belong to the class, summed
    with their signs aligned, over the same sum of the bias (algorithm 4, with its scale). For one example and one
    step that is exact. Nothing else of the update is used.
    """

    kind = "search"
    applies_to = (AppliesTo(),)

    layer: str | None = None  # whose input is matched; None: the last fully connected one
    m: Positive = 0.5  # rows per class in an earlier layer: a share of them up to 1, a count above
    steps: Count = 300  # outer steps per start
    inner: Count = 20  # L-BFGS iterations in an outer step
    restarts: Count = 4
    history: Count = 100
    tol: Weight = 1e-7  # of the representations' squared norm

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        check_seen(seen)
        for s in seen:
            if s.loss.targets != "classes":
                raise AttackError(
                    f"rep matches the mean representation of each class, and the loss {describe(s.loss)} is not one of "
                    "classes. Use dlg, gs or newton."
                )
        refuse_adaptive(seen, "rep")
        search = Search(
            squared_distance, lambda *_: LBFGS(self.history, True), self.steps * self.inner, self.restarts,
            tol=self.tol, cuts=(0.05, 0.15), stack=self._stack,
        )  # fmt: skip
        return search.run([s.as_one_step() for s in with_labels(at_one_model(seen), rngs, required=True)], rngs)

    def _stack(self, seen: Sequence[Observation]) -> Matching:
        """Return the problems of a group: one tensor to match, the class-wise representations (P, K, L)."""
        layer = self._layer(seen[0])
        check_alone(seen[0], layer)
        like = next(seen[0].model.parameters())
        target, weights = zip(*[self._target(s, layer) for s in seen], strict=True)
        return Matching(
            seen[0].model, (layer,), {layer: torch.stack(target).to(like)}, {layer: torch.stack(weights).to(like)},
            like.new_zeros(len(seen)), _class_means(seen[0], layer),
        )  # fmt: skip

    def _layer(self, seen: Observation) -> str:
        paths = [visit.path for visit in chain_of(seen.model, seen.input_shape, seen.num_classes).dense]
        if self.layer is not None and self.layer not in paths:
            raise AttackError(
                f"{self.layer!r} is not in the chain of fully connected layers. {did_you_mean(self.layer, paths)}"
                f"It has: {', '.join(paths)}."
            )
        return self.layer or paths[-1]

    def _target(self, seen: Observation, layer: str) -> tuple[Tensor, Tensor]:
        """Return r̂ (K, L) and its weights: 0 for classes that are not there and for entries that are not seen."""
        weight, bias = named(layer, "weight"), named(layer, "bias")
        if not {weight, bias} <= set(seen.visible):
            raise AttackError(
                f"The representations before {layer!r} are quotients of its weight and bias gradients, and the update "
                f"does not show both. It shows: {', '.join(seen.visible)}."
            )
        assert seen.labels is not None
        inferred = infer(
            seen.model, seen.update, seen.input_shape, seen.num_classes, InferenceSettings(m=self.m, convolutions=False)
        )
        top, bottom = inferred.vectors[layer][0], inferred.scales[layer][0]  # (K, L), (K,)
        sure = bottom.abs() > FAINT * seen.update.gradient[bias].abs().max()
        present = torch.bincount(seen.labels.to(top.device), minlength=seen.num_classes) > 0
        r = top / bottom.where(sure, torch.ones_like(bottom))[:, None]
        counts = (present & sure).to(r)[:, None].expand_as(r)
        if weight in seen.weights:
            shown = (seen.weights[weight] > 0).to(r)  # (rows, L); the last layer's rows are the classes
            counts = counts * (shown if len(shown) == len(r) else shown.amax(0))
        return r, counts


def _class_means(seen: Observation, layer: str) -> Callable[[Tensor, Tensor], Params]:
    f = prefix(seen.model, layer)

    def trial(x: Tensor, y: Tensor) -> Params:
        with quiet(seen.model):
            r = f(x.flatten(0, 1)).reshape(*x.shape[:2], -1)  # (P, N, L)
        share = y / y.sum(1, keepdim=True).clamp_min(1)  # (P, N, K)
        return {layer: share.mT @ r}

    return trial
