"""What the matching attacks minimise: a distance between gradients, plus terms on the images alone."""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradveil.attacks.matching import Distance, Matching
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
    """How one problem's unknowns lie in a vector: the images, then the logits of their labels."""

    images: tuple[int, ...]  # (N, *shape)
    classes: int
    bounds: tuple[float, float]
    labels: bool  # whether the labels are unknown too

    @classmethod
    def of(cls, seen: Observation) -> "Unknowns":
        """Read the layout off an observation; labels that the server knows are no unknowns."""
        images = (seen.num_examples, *seen.input_shape)
        return cls(images, seen.num_classes, seen.bounds, seen.labels is None)

    @property
    def pixels(self) -> int:
        """How many of the unknowns belong to the images."""
        return int(torch.Size(self.images).numel())

    @property
    def size(self) -> int:
        """How many unknowns a problem has."""
        return self.pixels + (self.images[0] * self.classes if self.labels else 0)

    def split(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return images (P, N, *shape) and label logits (P, N, K or 0) of z (P, d)."""
        x, logits = z[:, : self.pixels], z[:, self.pixels :]
        return x.reshape(-1, *self.images), logits.reshape(len(z), self.images[0], -1)


@dataclass(frozen=True)
class MatchingObjective:
    """Distance of the trial gradient to what was seen, plus penalties; P problems."""

    matching: Matching
    unknowns: Unknowns
    labels: Tensor | None  # (P, N, K) label probabilities, where they are no unknowns
    distance: Distance
    penalties: tuple[Penalty, ...] = ()

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (P,) and gradients (P, d) at point (P, d)."""
        z = point.detach().requires_grad_()
        with torch.enable_grad():
            x, found = self._trial(z)
            extra = torch.stack([penalty(x) for penalty in self.penalties]).sum(0) if self.penalties else None
        with torch.no_grad():
            value, slopes = self.distance(self.matching, found)
        outputs, cotangents = list(found.values()), [slopes[n] for n in found]
        if extra is not None:
            outputs, cotangents = [*outputs, extra], [*cotangents, torch.ones_like(extra)]
            value = value + extra.detach()
        (gradient,) = torch.autograd.grad(outputs, z, cotangents)
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
        x, logits = self.unknowns.split(z)
        y = logits.softmax(-1) if self.labels is None else self.labels
        return x, self.matching.trial(x, y)
