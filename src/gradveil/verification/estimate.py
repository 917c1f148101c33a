"""What canaries show: μ from their scores, a lower bound from guesses alone, and what the noise itself gives away.

Over the releases of a run a canary's score is x_j = Σ_r <released_r, u_jr>, so that x = A (b∘a) + σ A^½ n with the
Gram matrix A = Σ_r U_r U_rᵀ of the known directions, secret coins b_j and lengths a_j. Generalised least squares gives
the lengths and the noise σ with exact t statistics; a server that knows all other records tells one slot's coin with
μ_j = a_j √A_jj / σ. Guesses of the coins bound it without any law of the noise: Steinke, Nasr and Jagielski (2023) the
ε of (ε, δ)-DP; Mahloujifar, Melis and Chaudhuri (2025) a whole trade-off curve, here that of μ-Gaussian DP.

What is left of a release when the right candidate is taken off is the noise alone. torch's CPU normals come sixteen at
a time from 24-bit uniforms by Box-Muller in float32 (ATen/native/cpu/DistributionTemplates.h): entries i and i + 8 of a
block are r cos θ and r sin θ, with θ/2π on a lattice of 2⁻²⁴ and a generator that keeps 32 bits of its seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, pi, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom

Array = NDArray[np.float64]
ENOUGH = 8  # trials from which on each canary has a length of its own


@dataclass(frozen=True)
class Estimate:
    """μ and its interval, on average over canaries and for the worst of them."""

    mu: float
    low: float
    high: float
    worst: float  # the canary with the largest lower end, of all K at once
    worst_low: float
    confidence: float
    slots: int  # coins that were thrown


def fit(scores: Array, grams: Array, present: NDArray[np.bool_], base: bool, confidence: float) -> Estimate:
    """Fit scores (T, K) with Gram matrices (T, K, K) or (K, K) and coins (T, K).

    ``base``: something beside the canaries may be released, the same in every trial.
    """
    trials, count = scores.shape
    grams = np.broadcast_to(grams, (trials, count, count))
    apart, b = trials >= ENOUGH, present.astype(float)
    alike = bool((grams == grams[:1]).all())
    inverse = np.broadcast_to(_inverse(grams[:1] if alike else grams), grams.shape)
    own = grams * b[:, :, None]  # diag(b) A, and A⁻¹ cancels in what follows
    normal: Array = (own * b[:, None, :]).sum(0)
    right: Array = (b * scores).sum(0)
    if base and apart:
        beside, all_ = own.sum(0), grams.sum(0)
        normal = np.block([[normal, beside], [beside.T, all_]])
        right = np.concatenate([right, scores.sum(0)])
    if not apart:
        normal, right = np.full((1, 1), normal.sum()), np.full(1, right.sum())
    spread = _inverse(normal)
    found: Array = spread @ right
    total = float(np.einsum("tk,tkl,tl->", scores, inverse, scores, optimize=True))
    rank = int(np.linalg.matrix_rank(grams[0], hermitian=True))
    left = trials * rank - np.linalg.matrix_rank(normal, hermitian=True)
    sigma = sqrt(max(total - float(right @ found), 1e-30 * max(total, 1e-300)) / max(left, 1))
    size = np.sqrt(np.einsum("tkk->k", grams) / trials)  # √A_jj
    weights = np.zeros((count + 1, len(found)))
    weights[0, : count if apart else 1] = size / count if apart else size.mean()
    weights[1:, : count if apart else 1] = np.diag(size) if apart else size.mean()
    means, stds = weights @ found, np.sqrt(np.einsum("cq,qr,cr->c", weights, spread, weights))
    mu, low, high = interval(means[0], stds[0], sigma, left, confidence)
    each = interval(means[1:], stds[1:], sigma, left, 1 - (1 - confidence) / count) if apart else (mu, low, high)
    at = int(np.argmax(each[1])) if apart else 0
    worst, worst_low = (float(each[0][at]), float(each[1][at])) if apart else (float(mu), float(low))
    return Estimate(float(mu), float(low), float(high), worst, worst_low, confidence, b.size)


def _inverse(grams: Array) -> Array:
    found: Array = np.asarray(np.linalg.pinv(grams, rcond=1e-9, hermitian=True), np.float64)
    return found


def interval(mean: Any, std: Any, sigma: float, degrees: int, confidence: float) -> tuple[Any, Any, Any]:
    """Return mean/σ with its interval, where mean/(σ std) is noncentral t (Johnson and Welch's normal form)."""
    t, z = mean / (sigma * std), float(ndtri((1 + confidence) / 2))
    middle, width = t * (1 - 1 / (4 * degrees)), z * np.sqrt(1 + t**2 / (2 * degrees))
    return middle * std, np.maximum((middle - width) * std, 0.0), np.maximum((middle + width) * std, 0.0)


def from_outputs(scores: Array, grams: Array, ratio: float) -> Array:
    """Return what the outputs alone say of each coin (T, K), higher for in: no coin is used, as the bounds ask.

    ``ratio``: μ of one canary that is expected; it says how much the others' scores are worth beside the noise.
    """
    trials, count = scores.shape
    grams = np.broadcast_to(grams, (trials, count, count))
    size = max(float(np.einsum("tkk->", grams)) / grams[..., 0].size, 1e-300)
    length = max(2 * float(scores.sum()) / float(grams.sum()), 0.0)  # half of the slots are filled
    ridge = 4 * size / max(ratio, 1e-3) ** 2 * np.eye(count)
    centred = scores - length / 2 * grams.sum(2)
    return np.linalg.solve(grams + ridge, centred[..., None])[..., 0]


SHARE = 0.2  # of the slots are guessed, those with the most telling scores; fixed beforehand


@dataclass(frozen=True)
class Guessed:
    """Guesses of the most telling scores, half for in and half for out."""

    slots: int  # m
    made: int  # r
    right: int  # v

    def mu_low(self, confidence: float) -> float:
        """Return the largest μ that Gaussian DP is refuted for at this confidence; 0: none."""
        return _highest(lambda mu: self._refutes_mu(mu, 1 - confidence), 64.0)

    def epsilon_low(self, delta: float, confidence: float) -> float:
        """Return the largest ε that (ε, δ)-DP is refuted for at this confidence; 0: none."""
        return _highest(lambda epsilon: self._chance(epsilon, delta) < 1 - confidence, 64.0)

    def _refutes_mu(self, mu: float, level: float) -> bool:
        """Whether so many right guesses, at this level, would need more chances than there are (Mahloujifar et al.)."""
        share = level * self.made / self.slots
        r, h = share * self.right / self.made, share * (self.made - self.right) / self.made
        for i in range(self.right - 1, -1, -1):
            higher = max(h, float(ndtr(ndtri(min(r, 1.0)) - mu)))
            r += i / (self.made - i) * (higher - h)
            h = higher
            if r + h > self.made / self.slots:
                return True
        return False

    def _chance(self, epsilon: float, delta: float) -> float:
        """Return the most likely that so many guesses are right under (ε, δ)-DP (Steinke et al., theorem 5.2)."""
        likely = binom(self.made, 1 / (1 + exp(-epsilon)))
        tail = float(likely.sf(self.right - 1))
        if not delta or not self.right:
            return min(tail, 1.0)
        steps = np.arange(1, self.right + 1)
        gains = (likely.sf(self.right - 1 - steps) - tail) / steps
        return min(1.0, tail + 2 * self.slots * delta * float(gains.max()))


def guess(scores: np.ndarray, present: np.ndarray, share: float = SHARE) -> Guessed:
    """Guess in for the highest scores and out for the lowest, abstain in between; ``present`` says who is right."""
    flat, truth = scores.ravel(), present.ravel()
    each = max(1, int(share * len(flat) / 2))
    order = np.argsort(flat)
    right = int((~truth[order[:each]]).sum() + truth[order[-each:]].sum())
    return Guessed(len(flat), 2 * each, right)


def _highest(refuted: Callable[[float], bool], most: float) -> float:
    """Return where a condition that holds from 0 on ends, to a thousandth; 0 where it does not hold there."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


BLOCK, HALF = 16, 8
BITS = 24
SIGMAS = 6.0  # a chance of 1e-9 for a sound noise


def grain(residual: Array, starts: Sequence[int]) -> float:
    """Return by how many standard deviations the angles of pairs lie on torch's lattice; ``starts``: of the tensors.

    The angles of pairs that are no pairs of Box-Muller are taken off, so that a public grid on which everything is
    rounded counts for nothing.
    """
    blocks = [_blocks(part) for part in np.split(residual, starts[1:])]
    found = np.concatenate([b for b in blocks if len(b)] or [np.empty((0, BLOCK))])
    if not len(found):
        return 0.0
    right = _on_lattice(found[:, :HALF], found[:, HALF:])
    wrong = _on_lattice(found[:, :HALF], np.roll(found[:, HALF:], 1, axis=1))
    return float(np.mean(right - wrong)) * sqrt(right.size)  # each a cosine, of variance ½


def _blocks(part: Array) -> Array:
    whole = len(part) // BLOCK * BLOCK
    if len(part) < BLOCK:
        return np.empty((0, BLOCK))
    return part[: whole if whole == len(part) else whole - BLOCK].reshape(-1, BLOCK)  # the last is drawn again


def _on_lattice(cosine: Array, sine: Array) -> Array:
    turns = np.arctan2(sine, cosine) / (2 * pi) * 2.0**BITS
    return np.cos(2 * pi * turns)


def seed_of(residual: Array, starts: Sequence[int], seeds: range, before: Sequence[int] = (0,)) -> int | None:
    """Return the seed of a torch CPU generator whose first normals are the residual's, up to a factor; None: no one.

    ``before``: how many draws of the generator may come before them.
    """
    if not residual[: starts[1] if len(starts) > 1 else None].size >= BLOCK:  # short: drawn in another way
        return None
    seen = residual[:BLOCK] / np.linalg.norm(residual[:BLOCK])
    rng = torch.Generator()
    for seed in seeds:
        for skipped in before:
            rng.manual_seed(seed)
            torch.rand(skipped, generator=rng)
            normals = torch.randn(BLOCK, generator=rng).double().numpy()
            if seen @ normals > (1 - 1e-4) * np.linalg.norm(normals):
                return seed
    return None


def reused(residuals: Sequence[Array]) -> float:
    """Return the largest correlation of two releases' noise, in standard deviations of independent ones."""
    if len(residuals) < 2:
        return 0.0
    rows = np.stack([e / max(float(np.linalg.norm(e)), 1e-300) for e in residuals])
    alike = np.abs(rows @ rows.T - np.eye(len(rows)))
    return float(alike.max() * sqrt(rows.shape[1]))
