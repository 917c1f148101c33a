"""The rule as the authors' published code has it, for comparison: not the rule that the paper prints."""

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.defenses.base import DEFENSES, check_choice, check_positive
from gradveil.defenses.masking import LayerMask, budget
from gradveil.defenses.objective import PseudoInverse, best_direction, best_subset, column_scores
from gradveil.errors import SpecError
from gradveil.layers.jacobian import FunctionJacobian
from gradveil.scores import METHODS, leak_scores, row_norms


def authors_mask(r: Tensor, norms: Tensor, share: float, offset: float) -> Tensor:
    """Return the mask (N, L) of the entries that the authors' code zeroes: one row for the whole batch.

    Score ||∇r_i|| / (r_i + offset), with the sign of r, summed over the batch; the threshold is the percentile
    100 × share of these signed sums, and entries whose sum is *in absolute value* strictly below it are zeroed.
    So dead entries (sum 0) go first, nothing goes while the threshold is zero or less, and one entry with
    0 / 0 (dead, offset 0) makes the threshold NaN, and nothing goes at all.
    """
    sums = (norms / (r + offset)).sum(0)  # (L,)
    threshold = torch.quantile(sums, share)
    return (sums.abs() < threshold).expand_as(r)


_ROWS = 128  # in one vectorised backward pass


def jacobian(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return ∂r_n/∂x_n for each example, (N, L, d): dense, so for small inputs.

    With batch norm in train mode the batch statistics are held, so that examples do not mix.
    """
    products = FunctionJacobian(model, layer, x)
    n, length = len(products.r), products.r[0].numel()
    units = torch.eye(length, dtype=x.dtype, device=x.device).split(_ROWS)
    rows = [products.pull(some[:, None].expand(-1, n, -1).reshape(-1, *products.r.shape)) for some in units]
    return torch.cat(rows).flatten(2).transpose(0, 1).detach()


@DEFENSES.register("representation")
@dataclass(frozen=True)
class RepresentationPerturbation(LayerMask):
    """Zero the entries of the representation that give most of the input away, in one weight gradient only.

    The weight gradient of the defended layer is Σ δ_j r'_jᵀ in place of Σ δ_j r_jᵀ; r' is r with the ε entries of
    highest score |r_i| / ||∂r_i/∂x||₂ set to zero, per example (Sun et al. 2020, algorithms 1 and 2). Forward pass,
    bias gradient and all other gradients are unchanged.

    **A server that leaves the defended weight out of its matching, or reads the mask off it, undoes this.**

    Departures: entries that are zero already are never chosen; norms other than the paper's (q = 0, p = 2) follow
    the first-order objective max ||J⁺(r - r')||_p subject to ||r - r'||_q ≤ ε, with ε = share × ||r||_q for q ≠ 0.
    """

    q: float = 0  # the norm of r - r' that is bounded: 0 (entries zeroed), 1, 2 or inf (share × ||r||_q)
    p: float = 2  # the norm of the input's displacement: 1, 2 or inf
    score: Literal["diagonal", "pseudoinverse", "greedy"] = "diagonal"  # q = 0: the paper's, of J⁺, or of whole sets
    method: str = "auto"  # how leak scores are computed: auto, exact, sketch, ...
    mode: Literal["paper", "authors"] = "paper"  # the rule as printed, or as the authors' code has it
    offset: float = 0.0  # mode=authors: added to r_i below the fraction; their second script has 0.1
    rcond: float = 0.01  # singular values of J below this share of the largest are left out of J⁺
    target_mse: float | None = None  # in place of a share: as few entries of each example as certify this error
    kind: str = "global"  # target_mse: the certificate that has to reach it: local, global, box, radius or reach
    clip: bool = False  # q ≠ 0: keep r' within the range of r, so that no value gives the change away

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("q", self.q, (0, 1, 2, inf))
        check_choice("p", self.p, (1, 2, inf))
        check_choice("score", self.score, ("diagonal", "pseudoinverse", "greedy"))
        check_choice("method", self.method, METHODS)
        check_choice("mode", self.mode, ("paper", "authors"))
        check_positive("rcond", self.rcond)
        if self.target_mse is not None:
            self._check_target(self.target_mse)
        together = self.scope == "batch"
        if self.q != 0 and (self.count is not None or self.score != "diagonal" or together):
            raise SpecError("count, score and scope=batch choose entries to zero, so they need q=0. Leave them out.")
        if self.score == "greedy" and together:
            raise SpecError("score=greedy chooses a set for each example by itself. Use scope=sample.")
        if self.mode == "authors" and (self.q, self.p, self.score, self.count) != (0, 2, "diagonal", None):
            raise SpecError("mode=authors has a rule of its own: share and offset only. Leave q, p, score, count out.")

    def _check_target(self, target: float) -> None:
        from gradveil.defenses.target import TARGET_KINDS

        if not target > 0:
            raise SpecError(f"target_mse={target}: give a mean squared error above 0, of pixels in [0, 1].")
        check_choice("kind", self.kind, TARGET_KINDS)
        rule = (self.q, self.mode, self.scope, self.count, self.share)
        if rule != (0, "paper", "sample", None, type(self).share) or self.score == "greedy":
            raise SpecError(
                "target_mse chooses how many entries of each example are zeroed, one by one: leave share, count, q, "
                "scope, mode and score=greedy out."
            )

    def asked(self, model: nn.Module, layer: str, r: Tensor) -> int:
        """Return how many entries of r (N, ...) were asked for: none for q ≠ 0 or a target, which ask for no number."""
        return super().asked(model, layer, r) if self.q == 0 and self.target_mse is None else 0

    def ranking(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return the scores (N, L) by which entries are zeroed one by one."""
        if self.score == "diagonal":
            return leak_scores(model, layer, x, method=self.method, p=float(self.p))
        pairs = zip(jacobian(model, layer, x), r.flatten(1).to(x.dtype), strict=True)
        return torch.stack([column_scores(PseudoInverse.of(j, self.rcond), row, self.p) for j, row in pairs])

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        """Return r' for the inputs x (N, ...) and the layer's inputs r (N, ...)."""
        if self.target_mse is not None:
            from gradveil.defenses.target import zero_to_target

            scores = self.ranking(model, layer, x, r, rng)
            return zero_to_target(model, layer, x, r, scores, self.target_mse, self.kind, float(self.p))
        if self.share == 0 and not self.count:
            return r
        if self.mode == "authors":
            return self._as_authors(model, layer, x, r)
        if self.q == 0 and self.score != "greedy":
            return super().perturb(model, layer, x, r, rng)
        flat = r.flatten(1)  # (N, L)
        change = self._zero_best if self.q == 0 else self._move_best
        inverses = [PseudoInverse.of(j, self.rcond) for j in jacobian(model, layer, x)]
        rows = [change(inverse, row) for inverse, row in zip(inverses, flat, strict=True)]
        return torch.stack(rows).view_as(r)

    def _as_authors(self, model: nn.Module, layer: str, x: Tensor, r: Tensor) -> Tensor:
        _, norms = row_norms(model, layer, x, self.method)  # (N, L)
        flat = r.flatten(1)
        return flat.masked_fill(authors_mask(flat, norms, self.share, self.offset), 0.0).view_as(r)

    def _zero_best(self, inverse: PseudoInverse, r: Tensor) -> Tensor:
        count = budget(len(r), self.share, self.count)
        return r.masked_fill(best_subset(inverse, r.to(inverse.left.dtype), count, self.p), 0.0)

    def _move_best(self, inverse: PseudoInverse, r: Tensor) -> Tensor:
        if not len(inverse.values):
            return r  # the input does not move r at all
        u = best_direction(inverse, self.p, self.q).to(r.dtype)  # (L,)
        sign = -1.0 if torch.dot(u, r) > 0 else 1.0  # both do the same to first order: take the one that shrinks r
        moved: Tensor = r + sign * self.share * torch.linalg.vector_norm(r, self.q) * u
        return moved.clamp(r.min(), r.max()) if self.clip else moved
