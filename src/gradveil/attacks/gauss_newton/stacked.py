"""The equations of several rounds about the same examples, as one system: rows one below the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gradveil.attacks.gauss_newton.equations import Equations, Push


@dataclass(frozen=True)
class StackedEquations:
    """Each round's unknowns are the examples, which all share, and numbers of its own behind them."""

    parts: tuple[Equations, ...]
    places: tuple[Tensor, ...]  # of each part's unknowns among all n

    @cached_property
    def seen(self) -> Tensor:
        """What was seen (B, R)."""
        return torch.cat([part.seen for part in self.parts], 1)

    @cached_property
    def weights(self) -> Tensor:
        """The weight of each row's squared residual (B, R)."""
        return torch.cat([part.weights for part in self.parts], 1)

    @cached_property
    def noise(self) -> Tensor:
        """The known standard deviation of each row (B, R)."""
        return torch.cat([part.noise for part in self.parts], 1)

    @cached_property
    def rms(self) -> Tensor:
        """What the floor of each row is relative to (B, R)."""
        return torch.cat([part.rms for part in self.parts], 1)

    @property
    def rows_at_once(self) -> int:
        """How many rows' Jacobian is written out at once."""
        return max(part.rows_at_once for part in self.parts)

    def take(self, index: Tensor) -> "StackedEquations":
        """Return the equations of some of the problems."""
        return replace(self, parts=tuple(part.take(index) for part in self.parts))

    def residual(self, z: Tensor, width: Tensor | None) -> Tensor:
        """Return F(z) - seen (B, R) for z (B, n)."""
        return torch.cat([part.residual(z[:, place], width) for part, place in self._each()], 1)

    def products(self, z: Tensor, width: Tensor) -> tuple[Push, Push]:
        """Return v (B, n) -> dF/dz v (B, R) and u (B, R) -> (dF/dz)ᵀ u, at z."""
        both = [part.products(z[:, place], width) for part, place in self._each()]
        sizes = [part.seen.shape[1] for part in self.parts]

        def push(v: Tensor) -> Tensor:
            return torch.cat([one(v[:, place]) for (one, _), place in zip(both, self.places, strict=True)], 1)

        def pull(u: Tensor) -> Tensor:
            pulled = [back(piece) for (_, back), piece in zip(both, u.split(sizes, 1), strict=True)]
            return self._sum(z, pulled)

        return push, pull

    def curvature(self, z: Tensor, weights: Tensor, width: Tensor) -> Callable[[Tensor], Tensor]:
        """Return v (B, n) -> (dF/dz)ᵀ (weights · dF/dz v) at z; ``weights`` is (B, R)."""
        pieces = weights.split([part.seen.shape[1] for part in self.parts], 1)
        curved = [
            part.curvature(z[:, place], piece, width)
            for (part, place), piece in zip(self._each(), pieces, strict=True)
        ]  # fmt: skip
        return lambda v: self._sum(z, [one(v[:, at]) for one, at in zip(curved, self.places, strict=True)])

    def _each(self) -> Iterator[tuple[Equations, Tensor]]:
        return zip(self.parts, self.places, strict=True)

    def _sum(self, z: Tensor, parts: Sequence[Tensor]) -> Tensor:
        total = torch.zeros_like(z)
        for part, place in zip(parts, self.places, strict=True):
            total.index_add_(1, place, part)
        return total


Rows = Equations | StackedEquations


def normal_equations(
    rows: Rows, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return Kᵀ V⁻¹ K (b, n, n) and Kᵀ V⁻¹ residual (b, n), summed over the parts that K comes in."""
    normal, slope = x.new_zeros(*x.shape, x.shape[1]), x.new_zeros(*x.shape, 1)
    first = 0
    if isinstance(rows, StackedEquations):
        for part, place in zip(rows.parts, rows.places, strict=True):
            here = slice(first, first + part.seen.shape[1])
            h, g = normal_equations(part, x[:, place], residual[:, here], weights[:, here], width)
            normal[:, place[:, None], place] += h
            slope[:, place, 0] += g
            first = here.stop
        return normal, slope[..., 0]
    root = weights.sqrt()[:, None]
    for slopes in rows.jacobian(x, width):  # (b, n, some of the rows)
        here = slice(first, first + slopes.shape[2])
        scaled = slopes * root[..., here]
        normal.baddbmm_(scaled, scaled.mT)
        slope.baddbmm_(scaled, (root[..., here] * residual[:, None, here]).mT)
        first = here.stop
    return normal, slope[..., 0]


def stack(parts: Sequence[Equations], pixels: int, own: Sequence[int]) -> Rows:
    """Return the equations of all rounds: unknowns of the examples first, then ``own`` many of each round."""
    if len(parts) == 1:
        return parts[0]
    device, places, first = parts[0].seen.device, [], pixels
    for count in own:
        behind = torch.arange(first, first + count, device=device)
        places.append(torch.cat([torch.arange(pixels, device=device), behind]))
        first += count
    return StackedEquations(tuple(parts), tuple(places))
