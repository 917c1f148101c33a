"""The paper's problem solved with J⁺: entry by entry, for sets of entries, and for directions (q = 1, 2 or inf)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradveil.defenses.masking import EntryDefense, LayerDefense, LayerMask, Layers
from gradveil.privacy.noise import Source
from gradveil.protection.defense import DEFENSES
from gradveil.ranges import Norm, Share, Weight
from gradveil.representation.selection import (
    PseudoInverse,
    best_direction,
    best_subset,
    column_scores,
    each_example,
)


@DEFENSES.register("representation_pseudoinverse")
@dataclass(frozen=True)
class RepresentationPseudoinverse(LayerMask):
    """Zero the entries of the representation that each alone move the input most: ||J⁺ e_i r_i||_p.

    The paper's rule with the other entries of r held, where ``representation`` lets them move.
    """

    title = "Entries of a layer hidden, one by one"

    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        return each_example(lambda a, row: column_scores(a, row, self.p), model, layer, x, r.to(x.dtype), self.rcond)


@DEFENSES.register("representation_subset")
@dataclass(frozen=True)
class RepresentationSubset(EntryDefense):
    """Zero the entries of the representation that together move the input most, example by example."""

    title = "Entries of a layer hidden, together"

    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        count = self.budget(r)

        def zero_best(inverse: PseudoInverse, row: Tensor) -> Tensor:
            return row.masked_fill(best_subset(inverse, row.to(inverse.left.dtype), count, self.p), 0.0)

        return each_example(zero_best, model, layer, x, r, self.rcond).view_as(r) if count else r


@DEFENSES.register("representation_direction")
@dataclass(frozen=True)
class RepresentationDirection(LayerDefense):
    """Move the representation by share × ||r||_q in the direction that moves the input most, example by example."""

    title = "A direction of a layer hidden"

    share: Share = 0.4  # of ||r||_q: how far r is moved
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    q: Norm = 2  # the norm of the move: 1, 2 or inf
    p: Norm = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺
    clip: bool = False  # keep r' within the range of r, so that no value gives the change away

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        return each_example(self._move_best, model, layer, x, r, self.rcond).view_as(r) if self.share else r

    def _move_best(self, inverse: PseudoInverse, r: Tensor) -> Tensor:
        if not len(inverse.values):
            return r  # the input does not move r at all
        u = best_direction(inverse, self.p, self.q).to(r.dtype)  # (L,)
        sign = -1.0 if torch.dot(u, r) > 0 else 1.0  # both do the same to first order: take the one that shrinks r
        moved: Tensor = r + sign * self.share * torch.linalg.vector_norm(r, self.q) * u
        return moved.clamp(r.min(), r.max()) if self.clip else moved
