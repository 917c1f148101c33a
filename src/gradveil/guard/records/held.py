"""Gradients of records, one by one: what can be asked of them, and how those are that lie in memory as they are."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.guard.records.rounding import products, squares, sum_of_held, wide
from gradveil.tree import Params


class Records(ABC):
    """Gradients g_j of N records."""

    count: int
    like: Params  # the trained parameters, of which names, order, shapes and types count

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return upper bounds of each ||g_j||² (N,) in float64, as near as rounding lets them be."""

    def square_masses(self) -> Tensor:
        """Return upper bounds of what cancels in each g_j, squared (N,): where nothing does, norms (``rounding``)."""
        return self.square_norms()

    @property
    def formed(self) -> int:
        """Positions of gradients that ``along`` forms and ``weighted_sum`` does not; 0: none."""
        return 0

    @abstractmethod
    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R) with directions (R, *shape) by name, in float64."""

    @abstractmethod
    def each(self) -> Params:
        """Return the gradients themselves (N, *shape) by name."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j, in float32 at least; a record of weight 0 never counts, even where it is not finite.

        ``mass``: the most that one w_j g_j may be long, in clips; the sum is off by less than ``rounding`` says.
        """

    def pieces(self) -> Iterator[tuple["Records", slice]]:
        """Yield the records as they are held at once, and which of all they are."""
        yield self, slice(None)


@dataclass(frozen=True)
class Held(Records):
    """Gradients that lie side by side: (N, *shape) by name."""

    gradients: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many there are."""
        return len(next(iter(self.gradients.values())))

    @property
    def like(self) -> Params:  # type: ignore[override]
        """The parameters' shapes."""
        return {n: g.new_empty(g.shape[1:]) for n, g in self.gradients.items()}

    def square_norms(self) -> Tensor:
        """Return bounds of each ||g_j||² (N,)."""
        return torch.stack([squares(g, 1) for g in self.gradients.values()]).sum(0)

    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R)."""
        found = [products(g.flatten(1), directions[n].flatten(1)) for n, g in self.gradients.items()]
        return torch.stack(found).sum(0)

    def each(self) -> Params:
        """Return the gradients."""
        return self.gradients

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j."""
        kept, found = weights != 0, self.gradients
        if not bool(kept.all()):  # in its place: where the others are summed must not hang on it
            found = {n: g.masked_fill(~kept.view(-1, *[1] * (g.ndim - 1)), 0) for n, g in found.items()}
        return {n: sum_of_held(wide(g)[None], weights[None], mass)[0] for n, g in found.items()}


@dataclass(frozen=True)
class InParts(Records):
    """Gradients of some records after the others: computed anew for every question."""

    parts: Sequence[Callable[[], Held]]
    sizes: Sequence[int]
    like: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many there are."""
        return sum(self.sizes)

    def square_norms(self) -> Tensor:
        """Return bounds of each ||g_j||² (N,)."""
        return torch.cat([part().square_norms() for part in self.parts])

    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R)."""
        return torch.cat([part().along(directions) for part in self.parts])

    def each(self) -> Params:
        """Return the gradients (N, *shape)."""
        found = [part().gradients for part in self.parts]
        return {n: torch.cat([some[n] for some in found]) for n in found[0]}

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j."""
        total: Params = {}
        for part, some in self.pieces():
            found = part.weighted_sum(weights[some], mass)
            total = {n: g.double() + total[n] if total else g.double() for n, g in found.items()}
        return total

    def pieces(self) -> Iterator[tuple[Records, slice]]:
        """Yield the parts; each is computed once, so that what is measured of it is what is summed of it."""
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part(), slice(start, start + size)
            start += size
