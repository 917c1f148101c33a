"""The span of a layer's inputs, read off the gradient of its weight: dW = Σ δ xᵀ, so every input x lies in its rows."""

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

GAP = 3.0  # ratio of neighbouring singular values at which rounding begins
NEAR = 10.0  # times the floor: how far above it that may be
SPARE = 16  # one in so many directions is left to tell the floor by, however many inputs there are


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
        short = rows < most  # then all rows being filled does not show that there were no more inputs
        most = max(1, min(most, rows, width - max(1, width // SPARE)))
        floor = max(1e-15 * float(s[0]), _floor(s, rows, most), noise * (sqrt(rows) + sqrt(width)), 1e-300)
        ratios = s[:most] / s[1 : most + 1].clamp_min(floor)
        # gaps higher up are between inputs that weigh much and inputs that weigh little
        ratios = ratios * (s[1 : most + 1] < NEAR * floor)
        rank = int(ratios.argmax()) + 1
        clear = bool(ratios[rank - 1] > GAP) and not noise and not (short and rank == rows)
        if not clear:  # noise all over: what stands above it
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


def _floor(values: Tensor, rows: int, most: int) -> float:
    """Return the largest singular value of the noise or rounding that those beyond ``most`` are made of."""
    width = len(values)
    spread = values[most:].square().sum() / ((rows - most) * (width - most)) if rows > most else values.new_zeros(())
    return float(spread.sqrt()) * (sqrt(rows - most) + sqrt(width - most))
