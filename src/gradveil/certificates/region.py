"""Where a bound is claimed: the images within a distance R of one image, inside the data range."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

ROUNDING = 1e-12  # relative widening of every interval: thousands of float64 roundings


@dataclass(frozen=True)
class Region:
    """The p-ball of radius R around x, cut to the data range; without a radius the whole range."""

    x: Tensor  # (1, *shape) float64
    lower: Tensor  # (1, *shape): the smallest box around the region
    upper: Tensor
    p: float
    radius: float

    @classmethod
    def whole(cls, x: Tensor, bounds: tuple[float, float]) -> "Region":
        """Return the data range itself."""
        x = x.to(torch.float64)
        return cls(x, torch.full_like(x, bounds[0]), torch.full_like(x, bounds[1]), inf, inf)

    @classmethod
    def ball(cls, x: Tensor, p: float, radius: float, bounds: tuple[float, float]) -> "Region":
        """Return the ball around x (1, *shape), cut to the data range."""
        x = x.to(torch.float64)
        return cls(x, (x - radius).clamp(*bounds), (x + radius).clamp(*bounds), p, radius)

    def highest(self, rows: Tensor, constant: Tensor) -> Tensor:
        """Return the largest value (M,) that planes rows·x + constant take here, widened for rounding."""
        lower, upper = self.lower.flatten(1), self.upper.flatten(1)
        corner = torch.where(rows > 0, upper, lower)
        top = (rows * corner).sum(1)
        if self.p != inf:
            at_centre = rows @ self.x.flatten()
            top = torch.minimum(top, at_centre + self.radius * dual_norm(rows, self.p))
        wide = (rows.abs() * corner.abs()).sum(1) + constant.abs()
        return top + constant + ROUNDING * wide


def norm(x: Tensor, p: float) -> Tensor:
    """Return the p-norm of each row (N,) of x (N, ...)."""
    found: Tensor = torch.linalg.vector_norm(x.flatten(1), p, dim=1)
    return found


def dual_norm(x: Tensor, p: float) -> Tensor:
    """Return the norm dual to p of each row: inf for 1, 2 for 2, 1 for inf."""
    return norm(x, {1: inf, 2: 2, inf: 1}[p])


def farthest(x: Tensor, bounds: tuple[float, float], p: float) -> Tensor:
    """Return the largest distance (N,) from x to an image in the data range."""
    low, high = bounds
    return norm(torch.maximum(x - low, high - x), p)


def ratio(distance: Tensor, size: Tensor | float) -> Tensor:
    """Return distance / size (N,): infinite where f does not move at all, 0 where r′ is r."""
    size = torch.as_tensor(size, dtype=distance.dtype, device=distance.device)
    return torch.where(distance > 0, distance / size, torch.zeros_like(distance))
