"""What every method hands back: the representation and the norms of the rows of its Jacobian."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gradveil.layers.rules.base import wide

NORMS = (1.0, 2.0, inf)  # the p that exact methods know; estimators know 2 only
TINY = 1e-17  # squares of smaller float32 numbers lose digits, or are zero


@dataclass(frozen=True)
class RowNorms:
    """r and, for each p asked for, ||∂r_i/∂x||_p of every entry."""

    r: Tensor  # (N, L)
    norms: dict[float, Tensor]  # p -> (N, L)


def reduce_norms(g: Tensor, ps: Sequence[float]) -> list[Tensor]:
    """Return the p-norms of g (K, N, ...) over all but its first two dimensions, each (K, N)."""
    order = sorted(range(2, g.ndim), key=g.stride, reverse=True)  # as it lies in memory: no copy
    flat = wide(g).permute(0, 1, *order).flatten(2)
    if not flat.shape[2]:
        return [flat.new_zeros(flat.shape[:2]) for _ in ps]
    return [_checked(lambda t, p=p: torch.linalg.vector_norm(t, p, dim=2), flat, p) for p in ps]  # type: ignore[misc]


def stack_norms(stack: Tensor, ps: Sequence[float]) -> list[Tensor]:
    """Return the p-norms over the first dimension of a stack (K, N, ...), each (N, L)."""
    flat = wide(stack).flatten(2)
    reduce: dict[float, Callable[[Tensor], Tensor]] = {
        1.0: lambda t: t.abs().sum(0),
        2.0: lambda t: t.square().sum(0).sqrt(),  # ten times as fast as the norm over a first dimension
        inf: lambda t: t.abs().amax(0),
    }
    return [_checked(reduce[p], flat, p) for p in ps]


def _checked(norm: Callable[[Tensor], Tensor], flat: Tensor, p: float) -> Tensor:
    """Return a norm; once more in double precision where squares of small numbers have lost digits."""
    found = norm(flat)
    if p != 2 or flat.dtype != torch.float32:
        return found
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():  # no look at values while a call is recorded
        return found
    return norm(flat.double()).float() if bool((found < TINY).any()) else found


def add_norms(a: Tensor, b: Tensor, p: float) -> Tensor:
    """Return the p-norm of two vectors put end to end, from their norms."""
    if p == inf:
        return torch.maximum(a, b)
    return torch.hypot(a, b) if p == 2 else a + b


def scores(r: Tensor, norms: dict[float, Tensor], p: float) -> Tensor:
    """Return |r_i| ||g||_p / ||g||_2², the p-norm of r_i times the pseudo-inverse of the row g = ∂r_i/∂x.

    For p = 2 that is |r_i| / ||g||_2 (Sun et al. 2020, algorithm 1). An entry that is zero scores 0; one that is
    not, with a gradient of zero, scores +inf.
    """
    size, two = wide(r).abs(), norms[2.0]
    found = size / two  # a gradient of zero: inf, or NaN where r is zero as well
    if p != 2:
        found = torch.where(two == 0, found, found * (norms[p] / two))
    return found.masked_fill_(r == 0, 0.0)
