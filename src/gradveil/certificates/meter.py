"""The leak meter: how well any server could rebuild the input from everything that was sent, to first order.

The theorem on representations speaks of one layer; this speaks of the whole update. With K the Jacobian of all
visible numbers by the input, N their noise and Λ the precision of a Gaussian prior fitted to public data, the
Bayesian Cramér-Rao figure is tr((KᵀN⁻¹K + Λ)⁻¹) / n (van Trees): the least mean squared error of any estimator
in the linearised Gaussian model. Rank and singular values say which directions are seen at all; the inversion
influence (Zhang et al. 2023) is the error of a server without a prior.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from gradveil.certificates.information import Equations, bayes_mse, equations, probed_mse
from gradveil.priors import GaussianPrior
from gradveil.types import Batch, Observation

EXACT = 1024  # unknowns up to which the Jacobian is written out
ASSUMPTIONS = (
    "The update is replaced by its linearisation at the true input.",
    "Inputs are drawn from a Gaussian fitted to public data; an average over it, no promise for one image.",
    "Noise is Gaussian and independent; where the update has none, a floor relative to its size stands for it.",
    "The server knows the model, the labels and the defence; it sees only the tensors and entries of this observation.",
)
RANK = 1e-7  # singular values below this share of the largest count as zero


@dataclass(frozen=True)
class Leak:
    """What an update gives away, to first order."""

    mse: float  # Bayesian Cramér-Rao: below it no server gets, on average, under the assumptions
    prior_mse: float  # the same before anything was sent
    unknowns: int
    rank: int | None = None  # of K; None where only products with K were formed
    singular_values: Tensor | None = None  # of K, falling
    influence: float | None = None  # mean squared error of the least-squares server, no prior; inf below full rank
    influence_floor: float | None = None  # a lower bound of it that needs no inverse
    how: str = ""
    assumptions: tuple[str, ...] = ASSUMPTIONS


def leak_meter(
    seen: Observation,
    truth: Batch,
    prior: GaussianPrior | None = None,
    *,
    floor: float = 1e-3,
    exact_limit: int = EXACT,
    probes: int = 8,
    steps: int = 60,
    rng: Generator | None = None,
) -> Leak:
    """Return how much of the true inputs the observed update gives away.

    ``prior`` defaults to the observation's own, else to independent pixels with the variance of a uniform draw from
    the data range. Above ``exact_limit`` unknowns the trace comes from Hutchinson probes and conjugate gradients.
    """
    system = equations(seen, truth, floor)
    prior = prior or seen.prior or flat_prior(seen)
    before = float(prior.factor.double().square().sum()) / len(prior.mean) + prior.ridge
    n = len(system.x)
    if n > exact_limit:
        rng = rng or torch.Generator().manual_seed(0)
        mse = probed_mse(system.information, prior, system.x, probes, steps, rng)
        how = f"Hutchinson with {probes} probes, conjugate gradients with up to {steps} steps (errs low)"
        return Leak(mse, before, n, how=how)
    jacobian = system.jacobian()
    return _exact(system, jacobian, prior, before)


def several_rounds(seen: Sequence[Observation], truth: Batch, prior: GaussianPrior, *, floor: float = 1e-3) -> float:
    """Return the figure for a server that saw updates of the same inputs in several rounds: information adds up."""
    total = sum(information(equations(s, truth, floor)) for s in seen)
    assert isinstance(total, Tensor)
    return bayes_mse(total, prior)


def averaged(
    seen: Sequence[Observation], truths: Sequence[Batch], prior: GaussianPrior, *, floor: float = 1e-3
) -> float:
    """Return the van Trees bound with the information averaged over inputs before it is inverted.

    With inputs drawn from the prior itself and real noise this is a lower bound for every estimator, free of the
    linearisation; the mean of single figures is never below it (tr A⁻¹ is convex).
    """
    parts = [information(equations(s, t, floor)) for s, t in zip(seen, truths, strict=True)]
    return bayes_mse(torch.stack(parts).mean(0), prior)


def information(system: Equations) -> Tensor:
    """Return the Fisher information KᵀN⁻¹K (n, n) of the inputs."""
    scaled = system.jacobian() / system.noise[:, None]
    return scaled.T @ scaled


def flat_prior(seen: Observation) -> GaussianPrior:
    """Return independent pixels around mid-grey with the variance of a uniform draw from the data range."""
    low, high = seen.bounds
    mean = torch.full((int(torch.Size(seen.input_shape).numel()),), (low + high) / 2)
    return GaussianPrior.white(mean, (high - low) / 12**0.5)


def _exact(system: Equations, jacobian: Tensor, prior: GaussianPrior, before: float) -> Leak:
    n = len(system.x)
    scaled = jacobian / system.noise[:, None]
    mse = bayes_mse(scaled.T @ scaled, prior)
    triangle = torch.linalg.qr(jacobian, mode="r").R
    _, sizes, turned = torch.linalg.svd(triangle, full_matrices=False)
    rank = int((sizes > RANK * sizes[0]).sum()) if sizes[0] > 0 else 0
    # Kᵀ n along each singular direction has this variance:
    pushed = (system.noise[:, None] * (jacobian @ turned.T)).square().sum(0)
    influence = float((pushed / sizes**4).sum() / n) if rank == n else float("inf")
    floor = float(pushed.sum() / sizes[0].clamp_min(1e-300) ** 4 / n)
    how = f"exact Jacobian, {len(jacobian)} numbers seen for {n} unknowns"
    return Leak(mse, before, n, rank, sizes, influence, floor, how)
