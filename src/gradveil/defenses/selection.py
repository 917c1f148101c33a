"""Choose entries: exactly so many, live ones only, ties by index."""

import torch
from torch import Tensor

LONG = 2**14  # entries of a row from which one block of a CUDA device is too few
_DEAD = -1.0  # below every score, and scores are never negative


def budget(length: int, share: float, count: int | None) -> int:
    """Return how many of ``length`` entries to take: ``count`` where it is given, else a share of them."""
    return min(length, round(share * length) if count is None else count)


def largest(keys: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest keys of each row; of equal ones the first come first."""
    length = keys.shape[1]
    if count <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)  # (N, L)
    if count >= length:
        return torch.ones_like(keys, dtype=torch.bool)  # (N, L)
    last = last_by_top(keys, count) if keys.is_cuda and length > LONG else last_by_rank(keys, count)
    above, equal = keys > last, keys == last  # (N, L)
    left = count - above.sum(1, keepdim=True)  # (N, 1), places for those equal to it
    return above | (equal & (equal.cumsum(1) <= left))


def last_by_rank(keys: Tensor, count: int) -> Tensor:
    """Return the smallest of the ``count`` largest keys of each row (N, 1)."""
    return keys.kthvalue(keys.shape[1] - count + 1, dim=1, keepdim=True).values


def last_by_top(keys: Tensor, count: int) -> Tensor:
    """Return the same; on CUDA a row is shared by many blocks here, where ``kthvalue`` gives it to one."""
    return keys.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)


def largest_live(r: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the mask (N, L) of the ``count`` largest scores of each row among its live entries, r_i ≠ 0.

    A dead entry is zero already: it never spends the budget. A row with fewer live entries gives them all.
    """
    return largest(_keys(r, scores, _DEAD), count) & (r != 0)


def largest_live_each(r: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """Return the mask (K, B, L) of ``largest_live`` with a count of its own (K, 1, 1) for each of K batches.

    ``counts`` may lie on a device: nothing waits for it.
    """
    order = _keys(r, scores, _DEAD).argsort(dim=-1, descending=True, stable=True)
    taken = (torch.arange(r.shape[-1], device=r.device) < counts).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, taken) & (r != 0)


def largest_live_together(r: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return one mask for the whole batch (N, L): the ``count`` largest sums of scores over it.

    An entry is live here when it is live for any example.
    """
    total = _keys(r, scores, 0.0).sum(0, keepdim=True)  # (1, L)
    chosen = largest_live((r != 0).any(0, keepdim=True).to(total.dtype), total, count)
    return chosen.expand_as(r)


def _keys(r: Tensor, scores: Tensor, dead: float) -> Tensor:
    """Return what live entries are ordered by, and ``dead`` for the others; an undefined score is the highest."""
    return torch.where(r != 0, scores.nan_to_num(nan=torch.inf, posinf=torch.inf), dead)
