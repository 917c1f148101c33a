"""The prior over all unknowns of a problem: its examples, and a few numbers beside them, with its inverse at hand."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.errors import AttackError
from gradveil.priors import GaussianPrior
from gradveil.types import Observation


@dataclass(frozen=True)
class Prior:
    """N examples of d numbers, each N(mean, Σ) with Σ = V diag(v) Vᵀ + ridge (I - V Vᵀ), and k standard normal numbers.

    Points are vectors of n = N d + k numbers.
    """

    examples: int
    extra: int  # k
    mean: Tensor  # (d,)
    basis: Tensor  # V (d, m), orthonormal columns
    variances: Tensor  # v (m,), ridge included
    ridge: float  # variance in every other direction

    @classmethod
    def of(cls, seen: Observation, extra: int, device: torch.device) -> "Prior":
        """Return the observation's prior; where it has none, independent pixels around mid-grey."""
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
        basis, scales = _orthogonal(prior.factor.to(device, torch.float64))
        mean = prior.mean.to(device, torch.float64)
        return cls(seen.num_examples, extra, mean, basis, scales**2 + prior.ridge, prior.ridge)

    @property
    def pixels(self) -> int:
        """How many of the unknowns belong to the examples: N d."""
        return self.examples * len(self.mean)

    def center(self) -> Tensor:
        """Return the prior's mean (n,)."""
        return torch.cat([self.mean.repeat(self.examples), self.mean.new_zeros(self.extra)])

    def precise(self, z: Tensor) -> Tensor:
        """Return the inverse covariance times z (B, n)."""
        return self._apply(z, 1 / self.variances, 1 / self.ridge)

    def covary(self, z: Tensor) -> Tensor:
        """Return the covariance times z (B, n)."""
        return self._apply(z, self.variances, self.ridge)

    def precision(self) -> Tensor:
        """Return the inverse covariance as a matrix (n, n)."""
        return self.precise(torch.eye(self.pixels + self.extra, dtype=self.mean.dtype, device=self.mean.device))

    def draw(self, count: int, rng: Generator) -> Tensor:
        """Return draws (count, n) around zero."""
        white = torch.randn(count, self.pixels, generator=rng, dtype=self.mean.dtype, device=rng.device)
        beside = white.new_zeros(count, self.extra)
        return self._apply(torch.cat([white, beside], 1).to(self.mean.device), self.variances.sqrt(), self.ridge**0.5)

    def _apply(self, z: Tensor, inside: Tensor, outside: float) -> Tensor:
        v = z[:, : self.pixels].reshape(len(z), self.examples, -1)
        v = outside * v + ((v @ self.basis) * (inside - outside)) @ self.basis.T
        return torch.cat([v.flatten(1), z[:, self.pixels :]], 1)


def _orthogonal(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return orthonormal columns and their scales; a fitted prior's columns are orthogonal already."""
    gram = factor.T @ factor
    lengths = gram.diagonal().sqrt()
    if len(lengths) and bool((gram - gram.diagonal().diag()).abs().max() > 1e-5 * lengths.max() ** 2):
        basis, lengths, _ = torch.linalg.svd(factor, full_matrices=False)
        return basis, lengths
    kept = lengths > 1e-6 * lengths.max() if len(lengths) else lengths.bool()
    return factor[:, kept] / lengths[kept], lengths[kept]
