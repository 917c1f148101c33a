"""What the matching attacks minimise: a distance between gradients, plus terms on the images alone."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradveil.attacks.search.matching import Distance, Matching
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.tree import Params
from gradveil.types import Observation


class Penalty(Protocol):
    """A term on the images alone."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term of each problem (P,) for x (P, N, *shape), differentiable."""

    def take(self, rows: Tensor) -> "Penalty":
        """Return the term for the problems at these positions."""


@dataclass(frozen=True)
class Unknowns:
    """How one problem's unknowns lie in a vector: the images, free numbers behind their targets, an attack's own."""

    images: tuple[int, ...]  # (N, *shape)
    classes: int
    bounds: tuple[float, float]
    labels: bool  # whether the targets are unknown too
    loss: Loss = CROSS_ENTROPY  # which says what targets are
    own: int = 0  # further numbers that an attack looks for

    @classmethod
    def of(cls, seen: Observation, own: int = 0) -> "Unknowns":
        """Read the layout off an observation; labels that the server knows are no unknowns."""
        images = (seen.num_examples, *seen.input_shape)
        return cls(images, seen.num_classes, seen.bounds, seen.labels is None, seen.loss, own)

    @property
    def pixels(self) -> int:
        """How many of the unknowns belong to the images."""
        return int(torch.Size(self.images).numel())

    @property
    def size(self) -> int:
        """How many unknowns a problem has."""
        return self.pixels + (self.images[0] * self.classes if self.labels else 0) + self.own

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (P, N, *shape) and the free numbers of targets (P, N, K or 0) of z (P, d)."""
        x, free = z[:, : self.pixels], z[:, self.pixels : self.size - self.own]
        return x.reshape(-1, *self.images), free.reshape(len(z), self.images[0], -1)


@dataclass(frozen=True)
class MatchingObjective:
    """Distance of the trial gradient to what was seen, plus penalties; P problems."""

    matching: Matching
    unknowns: Unknowns
    labels: Tensor | None  # (P, N, K) targets as rows, where they are no unknowns
    distance: Distance
    penalties: tuple[Penalty, ...] = ()

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (P,) and gradients (P, d) at point (P, d)."""
        z = point.detach().requires_grad_()
        with torch.enable_grad():
            x, trial = self._trial(z)
            extra = torch.stack([penalty(x) for penalty in self.penalties]).sum(0) if self.penalties else None
        with torch.no_grad():
            value, slopes = self.distance(self.matching, trial)
        outputs, cotangents = list(trial.values()), [slopes[n] for n in trial]
        if extra is not None:
            outputs, cotangents = [*outputs, extra], [*cotangents, torch.ones_like(extra)]
            value = value + extra.detach()
        # A weight that the loss does not depend on has a zero gradient for every trial: nothing to steer by.
        moving = [(out, slope) for out, slope in zip(outputs, cotangents, strict=True) if out.requires_grad]
        if not moving:
            return value, torch.zeros_like(point)
        outs, slopes_of = zip(*moving, strict=True)
        (gradient,) = torch.autograd.grad(
            outs, z, slopes_of, materialize_grads=True
        )  # the images may have no say either
        return value, gradient

    def residual(self, point: Tensor) -> Tensor:
        """Return the distance alone (P,), without the penalties."""
        with torch.no_grad():
            return self.distance(self.matching, self._trial(point)[1])[0]

    def take(self, rows: Tensor) -> "MatchingObjective":
        """Return the problems at these positions."""
        labels = None if self.labels is None else self.labels.index_select(0, rows)
        penalties = tuple(penalty.take(rows) for penalty in self.penalties)
        return replace(self, matching=self.matching.take(rows), labels=labels, penalties=penalties)

    def _trial(self, z: Tensor) -> tuple[Tensor, Params]:
        x, free = self.unknowns.split(z)
        y = self.unknowns.loss.squash(free) if self.labels is None else self.labels
        own = z[:, self.unknowns.size - self.unknowns.own :]  # (P, own)
        return x, self.matching.gradients(x, y, own)


@dataclass(frozen=True)
class TotalVariation:
    """weight x (mean |difference of neighbouring rows| + mean |difference of neighbouring columns|)."""

    weight: float | Tensor  # for all problems, or one for each (P,)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term per problem (P,) for images x (P, N, C, H, W)."""
        rows = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
        columns = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
        return self.weight * (rows + columns)

    def take(self, rows: Tensor) -> "TotalVariation":
        """Return the term for the problems that are left."""
        return self if isinstance(self.weight, float) else TotalVariation(self.weight.index_select(0, rows))


@dataclass(frozen=True)
class Energy:
    """weight x mean square of the images' distance from a point: keeps them from running away."""

    weight: float
    centre: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term per problem (P,) for inputs x (P, N, *shape)."""
        return self.weight * (x - self.centre).square().flatten(1).mean(1)

    def take(self, rows: Tensor) -> "Energy":
        """Return itself: it is the same for all problems."""
        return self


@dataclass(frozen=True)
class GroupConsistency:
    """weight x mean square of the distance to the mean over the starts of the same update (Yin et al. 2021)."""

    weight: float
    owner: Tensor  # (P,) which update a start belongs to

    def __call__(self, x: Tensor) -> Tensor:
        """Return the term per problem (P,); the group's mean counts as fixed."""
        flat = x.flatten(1)
        count = int(self.owner.shape[0])
        total = torch.zeros_like(flat).index_add(0, self.owner, flat.detach())
        size = flat.new_zeros(count).index_add(0, self.owner, flat.new_ones(count))
        mean = (total / size.clamp_min(1)[:, None]).index_select(0, self.owner)
        return self.weight * (flat - mean).square().mean(1)

    def take(self, rows: Tensor) -> "GroupConsistency":
        """Return the term for the starts that are left; places in the sum are given out anew."""
        _, owner = self.owner.index_select(0, rows).unique(return_inverse=True)
        return GroupConsistency(self.weight, owner)
