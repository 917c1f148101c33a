"""Lower bounds from guessing which slots were filled, without any law of the noise: one run, abstentions allowed.

Steinke, Nasr and Jagielski (2023) bound the ε of (ε, δ)-DP; Mahloujifar, Melis and Chaudhuri (2025) test a whole
trade-off curve, here that of μ-Gaussian DP, which is tighter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

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
