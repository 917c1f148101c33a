"""Theorem 2 of the paper as printed, and two corrected versions that hold for the defended gradient.

The printed bound vanishes with T; the defended gradient is biased, so the loss does not, and a counterexample meets
every assumption (docs/theory/convergence.md). Theorems A and B keep the bias: a floor that T does not remove. The
figure to read is the a-posteriori gap, which needs no assumption on the run.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from gradveil.errors import CertificateError


@dataclass(frozen=True)
class KnownNumber:
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
    known: dict[str, KnownNumber] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.convexity <= self.smoothness:
            raise CertificateError(
                f"mu={self.convexity}, L={self.smoothness}: the bounds need 0 < mu <= L; add weight decay."
            )

    @property
    def condition(self) -> float:
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
        return self.vanishing + self.floor


def theorem_a(
    c: Constants, local_steps: int, devices: int, steps: int, bias: float | None = None, gradient: float | None = None
) -> Bound:
    """Return theorem A: any number I of local steps, step sizes 2 / (mu (gamma + t)), T a multiple of I.

    κ/(γ+T) (4(Q′ + C′)/μ + (μγ/2) ||W_0 - W*||²) + (8/3) κ δ_b²/μ with
    Q′ = Σ p_k² (σ_k + δ)² + (17/16)(6LΓ + 8(I-1)² G′²) + δ_b², C′ = (4/K) I² G′².
    ``bias`` is δ_b, at every iterate, at most δ = Λρ (the default); with the largest one seen at some iterates the
    figure is an estimate. ``gradient`` is G′, by default G: zeroing makes no gradient longer
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
    """Return theorem B: one local step (I = 1), every batch drawn afresh; a sharper floor.

    δ_b²/(2μ) + max(2κV/μ, γ (F(W_0) - F*)) / (γ+T), γ = 8κ; ``gap`` is F(W_0) - F*, ``variance`` V bounds the
    variance of the averaged defended gradient (G′²/K for K sampled devices). An epoch that is shuffled and dealt out in
    batches does not draw afresh: given the batches before, the mean of the next is not the mean over the data.
    """
    delta_b = c.error if bias is None else bias
    gamma = c.gamma(1)
    worst = max(2 * c.condition * variance / c.convexity, gamma * gap)
    return Bound(worst / (gamma + steps), delta_b**2 / (2 * c.convexity))


def a_posteriori(gradient_norm: float, convexity: float) -> float:
    """Return ||∇F(W)||² / (2μ) >= F(W) - F*: true of any W, however it was found."""
    return gradient_norm**2 / (2 * convexity)


@dataclass(frozen=True)
class LogisticProblem:
    """F(W) = mean cross-entropy + (decay / 2) ||W||² over devices of possibly different sizes; p_k = n_k / n."""

    inputs: Tensor  # (n, d)
    labels: Tensor  # (n,)
    owner: Tensor  # (n,): the device that holds each example
    decay: float
    num_classes: int = 10

    @cached_property
    def extended(self) -> Tensor:
        """x̃ = (x, 1) of every example (n, d + 1), in float64."""
        return extend(self.inputs)

    @cached_property
    def onehot(self) -> Tensor:
        return torch.nn.functional.one_hot(self.labels, self.num_classes).double()

    @cached_property
    def parts(self) -> Tensor:
        counts = torch.bincount(self.owner).double()
        return counts / counts.sum()

    def start(self) -> Tensor:
        return torch.zeros(self.num_classes, self.extended.shape[1], dtype=torch.float64)

    def value(self, w: Tensor) -> float:
        logits = self.extended @ w.double().T
        loss = torch.nn.functional.cross_entropy(logits, self.labels)
        return float(loss) + self.decay / 2 * float(w.double().square().sum())

    def gradient(self, w: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return ∇F(W), or with ``seen`` (n, d + 1) the defended field that is built from r′ in its place."""
        w = w.double()
        residual = (self.extended @ w.T).softmax(1) - self.onehot
        return residual.T @ (self.extended if seen is None else seen) / len(self.labels) + self.decay * w

    def bias(self, w: Tensor, seen: Tensor) -> float:
        """Return ||E∇F′(W) - ∇F(W)||: how far the mean defended gradient is from the true one."""
        return float((self.gradient(w, seen) - self.gradient(w)).norm())

    def device(self, k: int) -> "LogisticProblem":
        mine = self.owner == k
        return LogisticProblem(self.inputs[mine], self.labels[mine], self.owner[mine] * 0, self.decay, self.num_classes)

    def smoothness(self) -> float:
        """Return L of every F_k: the decay plus half the largest eigenvalue of a device's X̃ᵀX̃/n (softmax Hessian)."""
        rows = [self.extended[self.owner == k] for k in range(len(self.parts))]
        return self.decay + max(float(torch.linalg.matrix_norm(r, 2)) ** 2 / len(r) for r in rows) / 2

    def minimum(self, tolerance: float = 1e-7, steps: int = 20_000) -> Tensor:
        """Return a point near W* by L-BFGS; ``a_posteriori`` of its gradient says how near."""
        shape = tuple(self.start().shape)

        def both(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            w = torch.from_numpy(flat).reshape(shape)
            return self.value(w), self.gradient(w).reshape(-1).numpy()

        options: Any = {"maxiter": steps, "maxfun": 2 * steps, "gtol": tolerance, "ftol": 0.0, "maxcor": 30}
        found = minimize(both, self.start().reshape(-1).numpy(), jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x).reshape(shape)

    def constants(self, near: Tensor, seen: Tensor, batch_size: int = 32) -> Constants:
        """Return the constants of the bounds; ``near`` is a point near W*, ``seen`` (n, d + 1) the defended x̃′."""
        devices = [self.device(k) for k in range(len(self.parts))]
        length = self.extended.norm(dim=1)
        radius = float(length.max())
        sigmas = torch.tensor([_sigma(d.extended, batch_size) for d in devices], dtype=torch.float64)
        spread = self._spread(near, devices)
        away = float(near.norm()) + float(self.gradient(near).norm()) / self.decay
        moved = float((self.extended - seen).norm(dim=1).max())
        known = {
            "L": KnownNumber(self.smoothness(), "bounded", "weight decay + half the largest eigenvalue of X̃ᵀX̃/n"),
            "mu": KnownNumber(self.decay, "exact", "the weight decay"),
            "sigma_k": KnownNumber(float(sigmas.max()), "bounded", "sqrt(2 mean ||x̃||²), times the batch's correction"),
            "G": KnownNumber(2 * sqrt(2) * radius, "bounded", "2 sqrt(2) max ||x̃||, in the ball that W cannot leave"),
            "Lambda_s": KnownNumber(sqrt(2), "bounded", "||softmax - onehot||_2"),
            "Gamma": KnownNumber(spread, "bounded", "from points near each device's optimum and their gradients"),
            "||W0 - W*||": KnownNumber(away, "bounded", "distance to a point near W* plus its gradient over mu"),
            "rho": KnownNumber(moved, "exact", "the largest ||r - r′||_2 of any example"),
        }
        return Constants(
            known["L"].value, self.decay, self.parts, sigmas, known["G"].value, sqrt(2), spread, away, moved, known
        )

    def _spread(self, near: Tensor, devices: list["LogisticProblem"]) -> float:
        """Return an upper bound of Γ = F* - Σ p_k F_k*."""
        lowest = []
        for device in devices:
            point = device.minimum(1e-5, 2000)
            size = float(device.gradient(point).norm())
            lowest.append(device.value(point) - size**2 / (2 * self.decay))
        return self.value(near) - float((self.parts * torch.tensor(lowest, dtype=torch.float64)).sum())


def _sigma(extended: Tensor, batch_size: int) -> float:
    """Return an upper bound of the standard deviation of a mean gradient over a batch drawn without replacement."""
    n = len(extended)
    size = min(batch_size, n)
    share = (n - size) / (size * max(n - 1, 1))
    return sqrt(2 * float(extended.square().sum(1).mean()) * share)


def extend(inputs: Tensor) -> Tensor:
    """Return x̃ = (x, 1) in float64 for inputs (n, ...)."""
    flat = inputs.flatten(1).double()
    return torch.cat([flat, flat.new_ones(len(flat), 1)], 1)


def brightest_removed(inputs: Tensor, count: int) -> Tensor:
    """Return inputs (n, d) with the ``count`` largest entries of each row zeroed, ties by index.

    The defence where f is the identity: the score |r_i| / ||∇r_i|| is |x_i|, and zero entries are never spent on.
    """
    flat = inputs.flatten(1)
    order = flat.abs().argsort(dim=1, descending=True, stable=True)[:, :count]
    return flat.scatter(1, order, 0.0)
