"""A Gaussian prior with its inverse and its draws at hand: Σ = V diag(v) Vᵀ + ridge (I - V Vᵀ)."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.errors import AttackError
from gradveil.priors import GaussianPrior
from gradveil.types import Observation


@dataclass(frozen=True)
class Metric:
    """The prior's geometry on examples of d numbers."""

    mean: Tensor  # (d,)
    basis: Tensor  # (d, k), orthonormal columns
    variances: Tensor  # (k,), ridge included
    ridge: float  # variance in every other direction

    @classmethod
    def of(cls, seen: Observation, device: torch.device) -> "Metric":
        """Return the metric of the observation's prior; without one, independent pixels around mid-grey."""
        d = int(torch.Size(seen.input_shape).numel())
        low, high = seen.bounds
        prior = seen.prior
        if prior is None:
            # The variance of a uniform draw from the data range.
            prior = GaussianPrior.white(torch.full((d,), (low + high) / 2), (high - low) / 12**0.5)
        if prior.mean.numel() != d:
            raise AttackError(
                f"The prior is over {prior.mean.numel()} numbers and an example has {d} {seen.input_shape}. "
                "Fit it to public data of the same shape."
            )
        factor = prior.factor.to(device, torch.float64)
        basis, scales = _orthogonal(factor)
        return cls(prior.mean.to(device, torch.float64), basis, scales**2 + prior.ridge, prior.ridge)

    def precise(self, v: Tensor) -> Tensor:
        """Return Σ⁻¹ v for rows (..., d)."""
        return self._apply(v, 1 / self.variances, 1 / self.ridge)

    def covary(self, v: Tensor) -> Tensor:
        """Return Σ v for rows (..., d)."""
        return self._apply(v, self.variances, self.ridge)

    def precision(self) -> Tensor:
        """Return Σ⁻¹ as a matrix (d, d)."""
        return self.precise(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))

    def draw(self, count: int, rng: Generator) -> Tensor:
        """Return draws from N(0, Σ), (count, d)."""
        white = torch.randn(count, len(self.mean), generator=rng, dtype=self.mean.dtype, device=rng.device)
        return self._apply(white.to(self.mean.device), self.variances.sqrt(), self.ridge**0.5)

    def _apply(self, v: Tensor, inside: Tensor, outside: float) -> Tensor:
        return outside * v + ((v @ self.basis) * (inside - outside)) @ self.basis.T


def _orthogonal(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and their scales; a fitted prior's columns are orthogonal already."""
    gram = factor.T @ factor
    lengths = gram.diagonal().sqrt()
    if len(lengths) and bool((gram - gram.diagonal().diag()).abs().max() > 1e-5 * lengths.max() ** 2):
        basis, lengths, _ = torch.linalg.svd(factor, full_matrices=False)
        return basis, lengths
    kept = lengths > 1e-6 * lengths.max() if len(lengths) else lengths.bool()
    return factor[:, kept] / lengths[kept], lengths[kept]
