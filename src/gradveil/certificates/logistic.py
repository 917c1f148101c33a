"""l2-regularised multinomial logistic regression over devices: the problem on which every constant is provable.

The weights are one matrix (C, d + 1) whose last column is the bias; x̃ = (x, 1). With f the identity the defence
removes the ε largest pixels of each image from the gradient, never from the forward pass.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from gradveil.certificates.convergence import Constant, Constants


@dataclass(frozen=True)
class Logistic:
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
        """The labels as rows (n, C)."""
        return torch.nn.functional.one_hot(self.labels, self.num_classes).double()

    @cached_property
    def parts(self) -> Tensor:
        """p_k of every device (N,)."""
        counts = torch.bincount(self.owner).double()
        return counts / counts.sum()

    def start(self) -> Tensor:
        """Return W_0 = 0 (C, d + 1)."""
        return torch.zeros(self.num_classes, self.extended.shape[1], dtype=torch.float64)

    def value(self, w: Tensor) -> float:
        """Return F(W)."""
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

    def device(self, k: int) -> "Logistic":
        """Return the problem of one device alone: F_k."""
        mine = self.owner == k
        return Logistic(self.inputs[mine], self.labels[mine], self.owner[mine] * 0, self.decay, self.num_classes)

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
            "L": Constant(self.smoothness(), "bounded", "weight decay + half the largest eigenvalue of X̃ᵀX̃/n"),
            "mu": Constant(self.decay, "exact", "the weight decay"),
            "sigma_k": Constant(float(sigmas.max()), "bounded", "sqrt(2 mean ||x̃||²), times the batch's correction"),
            "G": Constant(2 * sqrt(2) * radius, "bounded", "2 sqrt(2) max ||x̃||, in the ball that W cannot leave"),
            "Lambda_s": Constant(sqrt(2), "bounded", "||softmax - onehot||_2"),
            "Gamma": Constant(spread, "bounded", "from points near each device's optimum and their gradients"),
            "||W0 - W*||": Constant(away, "bounded", "distance to a point near W* plus its gradient over mu"),
            "rho": Constant(moved, "exact", "the largest ||r - r′||_2 of any example"),
        }
        return Constants(
            known["L"].value, self.decay, self.parts, sigmas, known["G"].value, sqrt(2), spread, away, moved, known
        )

    def _spread(self, near: Tensor, devices: list["Logistic"]) -> float:
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
