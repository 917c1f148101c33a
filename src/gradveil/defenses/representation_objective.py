"""Which change of the representation moves the input most, to first order: max ||J⁺ u||_p subject to ||u||_q ≤ ε.

Sun et al. 2020 pose the problem and solve q = 0, p = 2 entry by entry, by a score that needs no J⁺. Here it is solved
with J⁺: entry by entry, for sets of entries, and for directions (q = 1, 2 or inf). J⁺ is truncated, since the smallest
singular values of J are numerical noise and J⁺ would be nothing but their inverses. Where no maximum is known to be
reached, the problem is NP-hard and gets an ascent that never goes down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from gradveil.defenses.masking import EntryDefense, LayerDefense, LayerMask, Layers, largest, largest_live
from gradveil.privacy.draws import Source
from gradveil.protection.defense import DEFENSES, check_choice
from gradveil.ranges import Order, Share, Weight
from gradveil.representation.layers.jacobian import FunctionJacobian
from gradveil.representation.layers.rules.base import wide
from gradveil.representation.scores.fast.again import check_seen

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


def _each_example(
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


@DEFENSES.register("representation_pseudoinverse")
@dataclass(frozen=True)
class RepresentationPseudoinverse(LayerMask):
    """Zero the entries of the representation that each alone move the input most: ||J⁺ e_i r_i||_p.

    The paper's rule with the other entries of r held, where ``representation`` lets them move.
    """

    title = "Entries of a layer hidden, one by one"

    p: Order = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("p", self.p, (1, 2, inf))

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return what each entry alone moves (N, L)."""
        return _each_example(lambda a, row: column_scores(a, row, self.p), model, layer, x, r.to(x.dtype), self.rcond)


@DEFENSES.register("representation_subset")
@dataclass(frozen=True)
class RepresentationSubset(EntryDefense):
    """Zero the entries of the representation that together move the input most, example by example."""

    title = "Entries of a layer hidden, together"

    p: Order = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("p", self.p, (1, 2, inf))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return r with the best set of each example zeroed."""
        count = self.budget(r)

        def zero_best(inverse: PseudoInverse, row: Tensor) -> Tensor:
            return row.masked_fill(best_subset(inverse, row.to(inverse.left.dtype), count, self.p), 0.0)

        return _each_example(zero_best, model, layer, x, r, self.rcond).view_as(r) if count else r


@DEFENSES.register("representation_direction")
@dataclass(frozen=True)
class RepresentationDirection(LayerDefense):
    """Move the representation by share × ||r||_q in the direction that moves the input most, example by example."""

    title = "A direction of a layer hidden"

    share: Share = 0.4  # of ||r||_q: how far r is moved
    layer: Layers = None  # the defended layers, joined by "/"; None: the last linear one
    q: Order = 2  # the norm of the move: 1, 2 or inf
    p: Order = 2  # the norm of the input's displacement: 1, 2 or inf
    rcond: Weight = 0.01  # singular values of J below this share of the largest are left out of J⁺
    clip: bool = False  # keep r' within the range of r, so that no value gives the change away

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("q", self.q, (1, 2, inf))
        check_choice("p", self.p, (1, 2, inf))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Source) -> Tensor:
        """Return the moved representation."""
        return _each_example(self._move_best, model, layer, x, r, self.rcond).view_as(r) if self.share else r

    def _move_best(self, inverse: PseudoInverse, r: Tensor) -> Tensor:
        if not len(inverse.values):
            return r  # the input does not move r at all
        u = best_direction(inverse, self.p, self.q).to(r.dtype)  # (L,)
        sign = -1.0 if torch.dot(u, r) > 0 else 1.0  # both do the same to first order: take the one that shrinks r
        moved: Tensor = r + sign * self.share * torch.linalg.vector_norm(r, self.q) * u
        return moved.clamp(r.min(), r.max()) if self.clip else moved


DEFENSES.renamed("representation:score=pseudoinverse", "representation_pseudoinverse")
DEFENSES.renamed("representation:score=greedy", "representation_subset")
for _q in ("1", "2", "inf"):
    DEFENSES.renamed(f"representation:q={_q}", f"representation_direction:q={_q}")
