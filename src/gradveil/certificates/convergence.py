"""Theorem 2 of the paper as printed, and two corrected versions that hold for the defended gradient.

The printed bound vanishes with T; the defended gradient is biased, so the loss does not, and a counterexample meets
every assumption (docs/theory/convergence.md). Theorems A and B keep the bias: a floor that T does not remove. The
figure to read is the a-posteriori gap, which needs no assumption on the run.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from gradveil.errors import CertificateError


@dataclass(frozen=True)
class Constant:
    """One number that a bound needs, and how it is known."""

    value: float
    how: Literal["exact", "bounded", "measured"]
    note: str


@dataclass(frozen=True)
class Constants:
    """What the bounds are computed from; ``known`` says of each how it was found."""

    smoothness: float  # L of every F_k
    convexity: float  # mu of every F_k
    parts: Tensor  # (N,) p_k
    sigmas: Tensor  # (N,) sigma_k: standard deviation of a stochastic gradient
    gradient: float  # G: root mean square of a stochastic gradient, at most
    output: float  # Lambda_s: norm of the loss gradient by the layer's output, at most
    spread: float  # Gamma = F* - sum p_k F_k*: how much the devices differ
    distance: float  # ||W_0 - W*||, at most
    displacement: float  # rho: ||r - r′||_2 of one example, at most
    known: dict[str, Constant] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.convexity <= self.smoothness:
            raise CertificateError(
                f"mu={self.convexity}, L={self.smoothness}: the bounds need 0 < mu <= L; add weight decay."
            )

    @property
    def condition(self) -> float:
        """kappa = L / mu."""
        return self.smoothness / self.convexity

    def gamma(self, local_steps: int) -> float:
        """Return gamma = max(8 kappa, I) of the step sizes 2 / (mu (gamma + t))."""
        return max(8 * self.condition, local_steps)

    @property
    def error(self) -> float:
        """Delta = Lambda_s rho: how far a defended stochastic gradient can be from the plain one."""
        return self.output * self.displacement


def printed_bound(c: Constants, epsilon: float, local_steps: int, devices: int, steps: int) -> float:
    """Return the paper's bound on E F(W_T) - F* after T = ``steps``: theorem 2 as printed. It does not hold.

    (2κ/(γ+T)) ((Q + C)/μ + (μγ/2) ||W_0 - W*||²), Q = Σ p_k² (Λε + σ_k²) + 6LΓ + 8(I-1)²(Λε + G²),
    C = (4/K) I² (Λε + G²).
    """
    shift = c.output * epsilon
    gamma = c.gamma(local_steps)
    q = float((c.parts**2 * (shift + c.sigmas**2)).sum()) + 6 * c.smoothness * c.spread
    q += 8 * (local_steps - 1) ** 2 * (shift + c.gradient**2)
    extra = 4 / devices * local_steps**2 * (shift + c.gradient**2)
    start = c.convexity * gamma / 2 * c.distance**2
    return 2 * c.condition / (gamma + steps) * ((q + extra) / c.convexity + start)


@dataclass(frozen=True)
class Bound:
    """A corrected bound: a part that falls with T and a floor that does not."""

    vanishing: float
    floor: float

    @property
    def value(self) -> float:
        """The bound on E F(W_T) - F*."""
        return self.vanishing + self.floor


def theorem_a(
    c: Constants, local_steps: int, devices: int, steps: int, bias: float | None = None, gradient: float | None = None
) -> Bound:
    """Return theorem A: any number I of local steps, step sizes 2 / (mu (gamma + t)), T a multiple of I.

    κ/(γ+T) (4(Q′ + C′)/μ + (μγ/2) ||W_0 - W*||²) + (8/3) κ δ_b²/μ with
    Q′ = Σ p_k² (σ_k + δ)² + (17/16)(6LΓ + 8(I-1)² G′²) + δ_b², C′ = (4/K) I² G′².
    ``bias`` is δ_b, at most δ = Λρ (the default); ``gradient`` is G′, by default G: zeroing makes no gradient longer
    where G comes from ||∂l/∂b|| ||r||.
    """
    delta_b = c.error if bias is None else bias
    g = c.gradient if gradient is None else gradient
    gamma = c.gamma(local_steps)
    q = float((c.parts**2 * (c.sigmas + c.error) ** 2).sum()) + delta_b**2
    q += 17 / 16 * (6 * c.smoothness * c.spread + 8 * (local_steps - 1) ** 2 * g**2)
    extra = 4 / devices * local_steps**2 * g**2
    start = c.convexity * gamma / 2 * c.distance**2
    vanishing = c.condition / (gamma + steps) * (4 * (q + extra) / c.convexity + start)
    return Bound(vanishing, 8 / 3 * c.condition * delta_b**2 / c.convexity)


def theorem_b(c: Constants, steps: int, gap: float, variance: float, bias: float | None = None) -> Bound:
    """Return theorem B: one local step (I = 1), a sharper floor.

    δ_b²/(2μ) + max(2κV/μ, γ (F(W_0) - F*)) / (γ+T), γ = 8κ; ``gap`` is F(W_0) - F*, ``variance`` V bounds the
    variance of the averaged defended gradient (G′²/K for K sampled devices).
    """
    delta_b = c.error if bias is None else bias
    gamma = c.gamma(1)
    worst = max(2 * c.condition * variance / c.convexity, gamma * gap)
    return Bound(worst / (gamma + steps), delta_b**2 / (2 * c.convexity))


def a_posteriori(gradient_norm: float, convexity: float) -> float:
    """Return ||∇F(W)||² / (2μ) >= F(W) - F*: true of any W, however it was found."""
    return gradient_norm**2 / (2 * convexity)


def sampled_variance(gradient: float, devices: int) -> float:
    """Return G′²/K: the variance of the mean of K devices drawn with replacement, at most."""
    return gradient**2 / devices
