"""What a server can know of the data before it sees an update: a Gaussian fitted to public images."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GaussianPrior:
    """A Gaussian over flattened inputs: ``x ~ N(mean, factor factorᵀ + ridge I)``.

    It stands for public data of the same kind, never for the client's own.
    """

    mean: Tensor  # (d,)
    factor: Tensor  # (d, k), columns: principal directions scaled by their standard deviations
    ridge: float  # variance in every direction beside

    @classmethod
    def fit(cls, inputs: Tensor, ridge: float = 1e-3, rank: int | None = None) -> "GaussianPrior":
        """Fit to public inputs (N, *shape), keeping at most ``rank`` principal directions."""
        flat = inputs.reshape(len(inputs), -1)
        mean = flat.mean(0)
        _, s, vt = torch.linalg.svd((flat - mean) / max(len(flat) - 1, 1) ** 0.5, full_matrices=False)
        k = len(s) if rank is None else min(rank, len(s))
        return cls(mean, vt[:k].T * s[:k], ridge)

    @classmethod
    def white(cls, mean: Tensor, std: float) -> "GaussianPrior":
        """Return a prior that knows the mean only: independent pixels of one standard deviation."""
        return cls(mean.reshape(-1), mean.new_zeros(mean.numel(), 0), std**2)

    def covariance(self) -> Tensor:
        """Return the dense covariance (d, d); for small inputs."""
        eye = torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device)
        return self.factor @ self.factor.T + self.ridge * eye

    def whiten(self, x: Tensor) -> Tensor:
        """Return ``Σ⁻¹ x`` for rows x (..., d), by the Woodbury identity."""
        k = self.factor.shape[1]
        if k == 0:
            return x / self.ridge
        inner = self.ridge * torch.eye(k, dtype=x.dtype, device=x.device) + self.factor.T @ self.factor
        inside = self.factor.T @ (x.mT if x.ndim > 1 else x)  # (k, ...)
        solved: Tensor = torch.linalg.solve(inner, inside)
        return (x - (self.factor @ solved).mT if x.ndim > 1 else x - self.factor @ solved) / self.ridge
