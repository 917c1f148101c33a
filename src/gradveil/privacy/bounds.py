"""Differential privacy of noisy, clipped updates, and what it says about reconstruction.

Reconstruction robustness (ReRo; Balle et al. 2022): the chance γ that any server, whatever it knows of the other
data, rebuilds one example to within a given error, from the chance κ that it guesses so well with no update at all.
It holds for the worst case and for any number of rounds, and needs clipping and noise: a "DP" baseline that clips
nothing has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log, sqrt
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtr, ndtri
from scipy.stats import binom
from torch import Tensor

from gradveil.errors import CertificateError, MissingExtraError

GRID = 100  # values of ε that are tried


class Chance(float):
    """A probability of reconstruction, with the sentences that it rests on."""

    assumptions: tuple[str, ...] = (
        "Adjacency: one example is put in or left out. Where the server knows how many there are, so that another one "
        "stands in its place, an update moves by up to 2 C, not C: halve the noise multiplier.",
        "Side knowledge: the server may know the model, every other example and every noised sum; the chance of a "
        "blind guess is the one it has with all of that, without this example's part.",
        "Every example is clipped to norm C on its own; a step's batch holds each with the sampling rate, "
        "independently of the others (Poisson), or all of them; the noise is fresh in every step.",
    )


@dataclass(frozen=True)
class GaussianTraining:
    """DP-SGD seen from outside: every step clips each example to norm C and adds noise of ``noise`` x C to the sum."""

    noise: float  # the noise multiplier
    sampling_rate: float  # chance of an example to be in a step's batch (Poisson); 1: every step uses all
    steps: int

    def __post_init__(self) -> None:
        if self.noise <= 0 or not 0 < self.sampling_rate <= 1 or self.steps < 1:
            raise CertificateError(
                f"noise={self.noise}, sampling_rate={self.sampling_rate}, steps={self.steps}: noise must be above 0, "
                "the rate in (0, 1] and steps at least 1."
            )

    @classmethod
    def of_opacus(cls, accountant: Any) -> "GaussianTraining":
        """Return what an Opacus accountant (``PrivacyEngine().accountant``) has counted; one setting for all steps."""
        history = [tuple(entry) for entry in accountant.history]
        if len({entry[:2] for entry in history}) != 1:
            raise CertificateError(
                f"The Opacus accountant holds {len(history)} stretches of training with different noise or sampling "
                "rates. Give one that trained with one setting."
            )
        noise, rate = history[0][:2]
        return cls(float(noise), float(rate), sum(int(entry[2]) for entry in history))

    def epsilon(self, delta: float) -> float:
        """Return the least ε that a privacy loss accountant proves at this δ, for adding or removing one example."""
        found: float = self._accountant().get_epsilon(delta)
        return found

    def epsilon_seen(self, delta: float) -> float:
        """Return the least ε at this δ where the batches are Poisson, and the server knows them.

        How often an example was used is then known, k times: √k/z Gaussian DP. δ is the mean over how k is drawn.
        """
        last = int(binom.isf(1e-6 * delta, self.steps, self.sampling_rate)) + 1
        uses = np.arange(1, min(last, self.steps) + 1)
        chances = binom.pmf(uses, self.steps, self.sampling_rate)
        left = float(binom.sf(uses[-1], self.steps, self.sampling_rate))
        mus = np.sqrt(uses) / self.noise

        def at(epsilon: float) -> float:
            second = np.exp(np.minimum(epsilon + log_ndtr(-mus / 2 - epsilon / mus), 0.0))
            return left + float(chances @ np.maximum(ndtr(mus / 2 - epsilon / mus) - second, 0.0))

        if at(0.0) <= delta:
            return 0.0
        high = 1.0
        while at(high) > delta:
            high *= 2
        return float(brentq(lambda epsilon: at(epsilon) - delta, 0.0, high, xtol=1e-10))

    def reconstruction(self, guess: float) -> "Chance":
        """Return the chance γ of a reconstruction that blind guessing reaches with chance ``guess``, with its grounds.

        Without sampling the Gaussian closed form, which is exact; with it the least of e^ε κ + δ(ε) over the whole
        privacy profile, negative ε included, which is as good as any test by duality.
        """
        _check(guess)
        if self.sampling_rate == 1:
            return Chance(rero_gaussian(guess, 1 / self.noise, self.steps))
        accountant = self._accountant()

        def at(epsilon: float) -> float:
            return rero(guess, epsilon, float(accountant.get_delta(epsilon)))

        # Above -log κ, e^ε κ exceeds 1; δ(ε) >= 1 - e^ε, so that far below 0 nothing beats ε = 0.
        lowest, highest = log(max(1 - at(0.0), 1e-9) / (1 - guess)), -log(guess)
        profile = [lowest + (highest - lowest) * i / GRID for i in range(GRID)]
        return Chance(min(map(at, [0.0, *profile])))

    def _accountant(self) -> Any:
        try:
            import dp_accounting as dp
            from dp_accounting import pld
        except ImportError as error:
            raise MissingExtraError("Privacy accounting", "certify") from error
        step: Any = dp.GaussianDpEvent(self.noise)
        if self.sampling_rate < 1:
            step = dp.PoissonSampledDpEvent(self.sampling_rate, step)
        return pld.PLDAccountant().compose(dp.SelfComposedDpEvent(step, self.steps))


def beside_a_count(noise: float, deviation: float) -> float:
    """Return the multiplier of gradients whose clip follows a noisy count, if both together are to be ``noise``.

    The count of clipped ones has noise of this standard deviation, and one that is missing counts as a half (Andrew et
    al. 2021): (z⁻² − (2 σ)⁻²)^(−1/2).
    """
    if not 0 < noise < 2 * deviation:
        raise CertificateError(
            f"noise-multiplier = {noise:g} with noise of {deviation:g} on the count of clipped ones: the count alone "
            "spends more than the whole. Give more noise on the count, or a smaller multiplier."
        )
    return float((noise**-2 - (2 * deviation) ** -2) ** -0.5)


def rero(guess: float, epsilon: float, delta: float = 0.0) -> float:
    """Return the chance of a reconstruction under (ε, δ): e^ε κ + δ, at most 1.

    The event "rebuilt within the error" has chance at most κ when the example is left out, for then the answer does
    not depend on it; (ε, δ) bounds what putting it back can do.
    """
    _check(guess)
    return min(1.0, exp(min(epsilon, 700.0)) * guess + delta)


def rero_gaussian(guess: float, ratio: float, steps: int = 1) -> float:
    """Return the chance of a reconstruction from Gaussian noise: Φ(Φ⁻¹(κ) + sqrt(T) Δ/σ), ``ratio`` = Δ/σ.

    By Neyman and Pearson no test between two Gaussians does better (Kaissis et al. 2023, for all data in every step).
    """
    _check(guess)
    return float(ndtr(ndtri(guess) + sqrt(steps) * ratio))


def _check(guess: float) -> None:
    if not 0 < guess < 1:
        raise CertificateError(f"guess={guess}: the chance of a blind guess lies between 0 and 1 (1/100: one of 100).")


def delta_of(mu: float, epsilon: float) -> float:
    """Return the δ at this ε of μ-Gaussian DP (Dong, Roth and Su 2022, corollary 2.13)."""
    if mu == 0:
        return 0.0
    first, second = float(ndtr(mu / 2 - epsilon / mu)), epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return max(0.0, first - exp(min(second, 0.0)))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the least ε >= 0 at this δ of μ-Gaussian DP."""
    _check_delta(delta)
    if mu == 0 or delta_of(mu, 0.0) <= delta:
        return 0.0
    return _crossing(lambda epsilon: delta_of(mu, epsilon) > delta)[1]


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest μ of Gaussian DP that is within (ε, δ)."""
    _check_delta(delta)
    if not (epsilon > 0 and isfinite(epsilon)):
        raise CertificateError(f"epsilon={epsilon}: give a number above 0.")
    return _crossing(lambda mu: delta_of(mu, epsilon) <= delta)[0]


def _crossing(below: Callable[[float], bool]) -> tuple[float, float]:
    """Return where a condition that holds from 0 on ends: just before and just after."""
    low, high = 0.0, 1.0
    while below(high):
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise CertificateError(f"delta={delta}: give a chance between 0 and 1, e.g. 1e-5.")


def water_filling(eigenvalues: Tensor | Sequence[float], rho: float) -> float:
    """Return the least squared error on a Gaussian of these eigenvalues that ρ nats leave: Σ min(θ, λ_i).

    The water level θ solves ½ Σ log⁺(λ_i/θ) = ρ (reverse water-filling).
    """
    values = torch.as_tensor(eigenvalues, dtype=torch.float64).flatten().cpu()
    if rho < 0 or not bool((values.isfinite() & (values >= 0)).all()):
        raise CertificateError(f"rho={rho}, or an eigenvalue below 0: a floor needs ρ >= 0 and a covariance.")
    values = values[values > 0].sort(descending=True).values
    if not len(values) or rho == inf:
        return 0.0
    logs = values.log()
    counts = torch.arange(1, len(values) + 1, dtype=torch.float64)
    levels = (logs.cumsum(0) - 2 * rho) / counts  # log θ where the first 1, 2, ... directions are flooded
    flooded = int((levels < logs).sum())  # holds up to the right number, and for none beyond it
    if flooded == 0:
        return float(values.sum())
    return float(levels[flooded - 1].exp()) * flooded + float(values[flooded:].sum())
