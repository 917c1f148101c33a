"""From scores to μ: what is released is Σ_j b_j a_j u_j + noise, with known directions u_j and secret coins b_j.

Over the releases of a run a canary's score is x_j = Σ_r <released_r, u_jr>, so that x = A (b∘a) + σ A^½ n with the
Gram matrix A = Σ_r U_r U_rᵀ of the directions. Generalised least squares gives the lengths a_j and the noise σ with
exact t statistics. A server that knows all other records tells one slot's coin with μ_j = a_j √A_jj / σ.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

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
