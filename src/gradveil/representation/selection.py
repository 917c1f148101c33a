"""Which entries of a representation to hide, by their scores; and the direction that moves the input most, by J⁺.

max ||J⁺ u||_p subject to ||u||_q ≤ ε is which change of the representation moves the input most, to first order (Sun et
al. 2020, equations 3 to 8). The paper solves q = 0, p = 2 entry by entry, by a score that needs no J⁺ (algorithm 1).
``best_direction`` solves it for p = q = 2.
"""

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.modules import under_transform
from gradveil.representation.jacobian import FunctionJacobian

LONG = 2**14  # entries of a row from which one block of a CUDA device is too few


def largest(keys: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest keys of each row; of equal ones the first come first."""
    length = keys.shape[1]
    if count <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)  # (N, L)
    if count >= length:
        return torch.ones_like(keys, dtype=torch.bool)  # (N, L)
    last = last_of(keys, count)
    if not keys.is_cuda and not under_transform():
        chosen = keys >= last
        if int(chosen.sum()) == count * len(keys):  # no row has more that are equal to its last
            return chosen
    above, equal = keys > last, keys == last  # (N, L)
    left = count - above.sum(1, keepdim=True)  # (N, 1), places for those equal to it
    return above | (equal & (equal.cumsum(1) <= left))


def last_of(keys: Tensor, count: int) -> Tensor:
    """Return the smallest of the ``count`` largest keys of each row (N, 1)."""
    return last_by_top(keys, count) if keys.is_cuda and keys.shape[1] > LONG else last_by_rank(keys, count)


def last_by_rank(keys: Tensor, count: int) -> Tensor:
    """Return the same, by the order of the keys."""
    place = keys.shape[1] - count
    if keys.is_cuda or keys.dtype not in (torch.float32, torch.float64) or under_transform():
        return keys.kthvalue(place + 1, dim=1, keepdim=True).values
    # numpy's partition takes a tenth of the time of torch's on a CPU
    return torch.from_numpy(np.partition(keys.detach().numpy(), place, axis=1)[:, place : place + 1].copy())


def last_by_top(keys: Tensor, count: int) -> Tensor:
    """Return the same; on CUDA a row is shared by many blocks here, where ``kthvalue`` gives it to one."""
    return keys.topk(count, dim=1, sorted=False).values.amin(1, keepdim=True)


def largest_live(r: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the mask (N, L) of the ``count`` largest scores of each row among its live entries, r_i ≠ 0.

    A dead entry is zero already: it never spends the budget. A row with fewer live entries gives them all.
    """
    return largest(_keys(r, scores), count) & (r != 0)


def largest_live_each(r: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """Return the mask (K, B, L) of ``largest_live`` with a count of its own (K, 1, 1) for each of K batches.

    ``counts`` may lie on a device: nothing waits for it.
    """
    return _first(zeroing_order(r, scores), counts) & (r != 0)


def zeroing_order(r: Tensor, scores: Tensor) -> Tensor:
    """Return the order (..., L) in which entries are zeroed: by falling score, ties by index, dead ones last."""
    return _keys(r, scores).argsort(dim=-1, descending=True, stable=True)


def zeroed(r: Tensor, order: Tensor, counts: int | Tensor) -> Tensor:
    """Return r′ (N, L): the first entries of each row's order set to zero, as many for all or each its own (N,)."""
    return r.masked_fill(_first(order, torch.as_tensor(counts, device=r.device).reshape(-1, 1)), 0.0)


def _first(order: Tensor, counts: Tensor) -> Tensor:
    taken = (torch.arange(order.shape[-1], device=order.device) < counts).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, taken)


def _keys(r: Tensor, scores: Tensor) -> Tensor:
    """Return what entries are ordered by: dead ones come last, an undefined score first."""
    return torch.where(r != 0, scores.nan_to_num(nan=torch.inf, posinf=torch.inf), -1.0)  # no score is negative


_ROWS = 128  # of a Jacobian in one vectorised backward pass
_WEAKEST = 0.01  # of the largest singular value of J: smaller ones are numerical noise


def jacobian(model: nn.Module, layer: str, x: Tensor, r: Tensor) -> Tensor:
    """Return ∂r_n/∂x_n for each example, (N, L, d): dense, so for small inputs. Raise where the model gives not r.

    With batch norm in train mode the batch statistics are held, so that examples do not mix.
    """
    products = FunctionJacobian(model, layer, x)
    products.check_examples()
    products.check_seen(r)
    n, length = len(products.r), products.r[0].numel()
    units = torch.eye(length, dtype=x.dtype, device=x.device).split(_ROWS)
    rows = [products.pull(some[:, None].expand(-1, n, -1).reshape(-1, *products.r.shape)) for some in units]
    return torch.cat(rows).flatten(2).transpose(0, 1).detach()


def best_direction(jacobian: Tensor) -> Tensor | None:
    """Return u (L,) of length 1 that moves the input most, ||J⁺ u||_2, for J (L, d); None where J is zero.

    It is the left singular vector of J's smallest singular value above the noise. The sign is free.
    """
    vectors, sizes, _ = torch.linalg.svd(jacobian, full_matrices=False)
    kept = (sizes > _WEAKEST * sizes[0]) & (sizes > 0)
    return vectors[:, kept][:, -1] if bool(kept.any()) else None
