"""Which entries of a representation to hide, by their scores; and the paper's problem itself, solved with J⁺.

max ||J⁺ u||_p subject to ||u||_q ≤ ε is which change of the representation moves the input most, to first order (Sun et
al. 2020, equations 3 to 8). The paper solves q = 0, p = 2 entry by entry, by a score that needs no J⁺ (algorithm 1).
Here it is solved with J⁺: entry by entry, for sets of entries, and for directions (q = 1, 2 or inf). J⁺ is truncated,
since the smallest singular values of J are numerical noise and J⁺ would be nothing but their inverses. Where no maximum
is known to be reached, the problem is NP-hard and gets an ascent that never goes down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.modules import under_transform
from gradveil.representation.layers.jacobian import FunctionJacobian
from gradveil.representation.layers.rules.base import wide
from gradveil.representation.scores.fast.replay import check_seen

LONG = 2**14  # entries of a row from which one block of a CUDA device is too few
_DEAD = -1.0  # below every score, and scores are never negative


def largest(keys: Tensor, count: int) -> Tensor:
    """Return the mask of the ``count`` largest keys of each row; of equal ones the first come first."""
    length = keys.shape[1]
    if count <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)  # (N, L)
    if count >= length:
        return torch.ones_like(keys, dtype=torch.bool)  # (N, L)
    last = last_by_top(keys, count) if keys.is_cuda and length > LONG else last_by_rank(keys, count)
    if not keys.is_cuda and not under_transform():
        chosen = keys >= last
        if int(chosen.sum()) == count * len(keys):  # no row has more that are equal to its last
            return chosen
    above, equal = keys > last, keys == last  # (N, L)
    left = count - above.sum(1, keepdim=True)  # (N, 1), places for those equal to it
    return above | (equal & (equal.cumsum(1) <= left))


def last_by_rank(keys: Tensor, count: int) -> Tensor:
    """Return the smallest of the ``count`` largest keys of each row (N, 1)."""
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


def zeroing_order(r: Tensor, scores: Tensor) -> Tensor:
    """Return the order (N, L) in which entries are zeroed: by falling score, ties by index, dead ones last."""
    keys = torch.where(r != 0, scores.nan_to_num(nan=torch.inf, posinf=torch.inf), -1.0)
    return keys.argsort(dim=1, descending=True, stable=True)


def zeroed(r: Tensor, order: Tensor, counts: int | Tensor) -> Tensor:
    """Return r′ (N, L): the first entries of each row's order set to zero, as many for all or each its own (N,)."""
    counts = torch.as_tensor(counts, device=r.device).reshape(-1, 1)
    gone = (torch.arange(r.shape[1], device=r.device) < counts).expand_as(order)
    return r.masked_fill(torch.zeros_like(gone).scatter(1, order, gone), 0.0)


_ROUNDS = 50  # of an ascent; each round raises the objective, or it is over
_ROWS = 128  # of a Jacobian in one vectorised backward pass


@dataclass(frozen=True)
class PseudoInverse:
    """J⁺ of one example, with singular values below ``rcond`` times the largest left out."""

    left: Tensor  # (L, k), left singular vectors of J, by falling singular value
    values: Tensor  # (k,), the singular values kept
    right: Tensor  # (d, k)

    @classmethod
    def of(cls, jacobian: Tensor, rcond: float) -> "PseudoInverse":
        """Decompose J (L, d)."""
        u, s, vt = torch.linalg.svd(jacobian, full_matrices=False)
        kept = (s > rcond * s[0]) & (s > 0)
        return cls(u[:, kept], s[kept], vt[kept].T)

    def dense(self) -> Tensor:
        """Return A = J⁺, (d, L)."""
        inverse: Tensor = (self.right / self.values) @ self.left.T
        return inverse


def jacobian(model: nn.Module, layer: str, x: Tensor, r: Tensor) -> Tensor:
    """Return ∂r_n/∂x_n for each example, (N, L, d): dense, so for small inputs. Raise where the model gives not r.

    With batch norm in train mode the batch statistics are held, so that examples do not mix.
    """
    products = FunctionJacobian(model, layer, x)
    products.check_examples()
    check_seen(products.r, r)
    n, length = len(products.r), products.r[0].numel()
    units = torch.eye(length, dtype=x.dtype, device=x.device).split(_ROWS)
    rows = [products.pull(some[:, None].expand(-1, n, -1).reshape(-1, *products.r.shape)) for some in units]
    return torch.cat(rows).flatten(2).transpose(0, 1).detach()


def each_example(
    change: Callable[[PseudoInverse, Tensor], Tensor], model: nn.Module, layer: str, x: Tensor, r: Tensor, rcond: float
) -> Tensor:
    """Return ``change`` of every example's J⁺ and row of r, stacked (N, L)."""
    inverses = [PseudoInverse.of(wide(j), rcond) for j in jacobian(model, layer, x, r)]
    return torch.stack([change(inverse, wide(row)) for inverse, row in zip(inverses, r.flatten(1), strict=True)])


def column_scores(inverse: PseudoInverse, r: Tensor, p: float) -> Tensor:
    """Return ||J⁺ e_i r_i||_p (L,): what entry i alone moves, the other entries of r being held."""
    norms: Tensor = torch.linalg.vector_norm(inverse.dense(), p, dim=0)
    return r.abs() * norms


def best_subset(inverse: PseudoInverse, r: Tensor, count: int, p: float) -> Tensor:
    """Return the mask (L,) of ``count`` live entries whose zeroing moves the input most: q = 0.

    p = 2: greedy, then swaps; p = inf: exact; p = 1: ascent in the signs. The budget is always spent.
    """
    count = min(count, int((r != 0).sum()))
    if count == 0:
        return torch.zeros_like(r, dtype=torch.bool)
    if p == 2:
        scaled = (inverse.left / inverse.values) * r[:, None]  # (L, k), and M = scaled scaledᵀ
        return _swap(scaled @ scaled.T, _grow(scaled @ scaled.T, r, count))
    moved = inverse.dense() * r  # (d, L), what each entry moves
    return _best_row(moved, r, count) if p == inf else _best_signs(moved, r, count)


def _grow(m: Tensor, r: Tensor, count: int) -> Tensor:
    """Return a mask of ``count`` entries: each time the one that adds most to 1ᵀ M 1 over the chosen."""
    gain = m.diagonal().masked_fill(r == 0, -inf).clone()  # (L,)
    chosen = torch.zeros_like(r, dtype=torch.bool)
    for _ in range(count):
        best = gain.argmax()
        chosen[best] = True
        gain += 2 * m[best]
        gain[best] = -inf
    return chosen


def _swap(m: Tensor, chosen: Tensor) -> Tensor:
    """Return the mask after swapping one entry out and one in while that raises 1ᵀ M 1."""
    chosen, diagonal = chosen.clone(), m.diagonal()
    live = diagonal > 0
    for _ in range(_ROUNDS):
        inside, outside = chosen.nonzero()[:, 0], (~chosen & live).nonzero()[:, 0]
        if not len(outside):
            break
        total = m[:, inside].sum(1)  # (L,)
        gain = (diagonal - 2 * total)[inside, None] + (diagonal + 2 * total)[outside] - 2 * m[inside][:, outside]
        best = int(gain.argmax())
        out, into = divmod(best, len(outside))
        if gain[out, into] <= 1e-6 * total[inside].sum():
            break
        chosen[inside[out]], chosen[outside[into]] = False, True
    return chosen


def _best_row(moved: Tensor, r: Tensor, count: int) -> Tensor:
    """Return the mask that moves one pixel most, over all pixels and both directions."""
    both = torch.cat([moved, -moved]).masked_fill(r == 0, -inf)  # (2d, L)
    masks = largest(both, count)
    return masks[torch.where(masks, both, 0.0).sum(1).argmax()]


def _best_signs(moved: Tensor, r: Tensor, count: int) -> Tensor:
    """Return a mask for the sum of absolute moves: fix the pixels' signs, choose, and again while it grows."""
    chosen = largest_live(r[None], moved.abs().sum(0)[None], count)[0]
    value = moved[:, chosen].sum(1).abs().sum()
    for _ in range(_ROUNDS):
        gain = (moved[:, chosen].sum(1).sign() @ moved).masked_fill(r == 0, -inf)  # (L,)
        trial = largest(gain[None], count)[0]
        new = moved[:, trial].sum(1).abs().sum()
        if new <= value:
            break
        chosen, value = trial, new
    return chosen


def best_direction(inverse: PseudoInverse, p: float, q: float) -> Tensor:
    """Return u (L,) with ||u||_q = 1 that moves the input most in the p-norm, for q = 1, 2 or inf.

    Exact for q = 1, for p = inf, and for p = q = 2 (the last kept left singular vector). The sign is free.
    """
    if p == q == 2:
        return inverse.left[:, -1]
    a = inverse.dense()  # (d, L)
    if q == 1:
        best = torch.linalg.vector_norm(a, p, dim=0).argmax()
        return torch.eye(a.shape[1], dtype=a.dtype, device=a.device)[best]
    if p == inf:
        return _unit(a[torch.linalg.vector_norm(a, 2 if q == 2 else 1, dim=1).argmax()], q)
    return _ascend(a, inverse.left[:, -1], p, q)


def _ascend(a: Tensor, start: Tensor, p: float, q: float) -> Tensor:
    """Return a local maximum of ||A u||_p over ||u||_q = 1: maximise its linear lower bound, again and again."""
    u = _unit(start, q)
    value = torch.linalg.vector_norm(a @ u, p)
    for _ in range(_ROUNDS):
        moved = a @ u
        trial = _unit(a.T @ (moved.sign() if p == 1 else moved), q)
        new = torch.linalg.vector_norm(a @ trial, p)
        if new <= value * (1 + 1e-6):
            break
        u, value = trial, new
    return u


def _unit(direction: Tensor, q: float) -> Tensor:
    """Return the u with ||u||_q = 1 that has the largest inner product with a direction, q = 2 or inf."""
    return direction / direction.norm() if q == 2 else torch.where(direction >= 0, 1.0, -1.0).to(direction)
