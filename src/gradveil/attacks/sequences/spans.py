"""The span of a layer's inputs, read off the gradient of its weight: dW = Σ δ xᵀ, so every input x lies in its rows."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

GAP = 5.0  # ratio of neighbouring singular values at which rounding begins


@dataclass(frozen=True)
class Span:
    """The directions in which inputs lie, and those in which none does."""

    basis: Tensor  # (width, rank), orthonormal columns, or what leads to them
    null: Tensor  # (width, width - rank)
    rank: int
    through: Tensor | None  # (seen, width): of an input, the part that the gradient shows; None: all
    clear: bool  # there was a gap between signal and rounding; without one, the rank is a guess

    @classmethod
    def of(cls, gradient: Tensor, most: int, noise: float = 0.0, through: Tensor | None = None) -> "Span":
        """Return the span of a weight's gradient (out, width) made of ``most`` inputs at most; ``noise``: its std.

        ``through``: what the layer's inputs go through before that weight.
        """
        rows, width = gradient.shape
        padded = torch.cat([gradient, gradient.new_zeros(max(0, width - rows), width)])
        _, s, vt = torch.linalg.svd(padded.double(), full_matrices=False)
        most = min(most, rows, width - 1)
        floor = max(1e-15 * float(s[0]), noise * (sqrt(rows) + sqrt(width)))
        ratios = s[:most] / s[1 : most + 1].clamp_min(max(floor, 1e-300))
        rank = int(ratios.argmax()) + 1
        clear = bool(ratios[rank - 1] > GAP) and not noise
        if not clear:  # noise all over: what stands above it, if that is known, else as many as there can be
            rank = max(1, min(most, int((s > floor).sum())))
        basis, null = vt[:rank].mT.contiguous(), vt[rank:].mT.contiguous()
        if through is not None:
            basis, null = through.T @ basis, through.T @ null
        return cls(basis, null, rank, through, clear)

    def away(self, x: Tensor) -> Tensor:
        """Return the share of inputs (..., width) that lies outside the span: (...), 0 for one that was there."""
        seen = x if self.through is None else x @ self.through.T
        size: Tensor = seen.norm(dim=-1).clamp_min(1e-30)
        share: Tensor
        if self.rank < self.null.shape[1]:  # the smaller product; in float64 it is good to 1e-8
            share = (1 - ((x @ self.basis).norm(dim=-1) / size).square()).clamp_min(0).sqrt()
        else:
            share = (x @ self.null).norm(dim=-1) / size
        return share
