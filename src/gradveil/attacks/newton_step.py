"""The Gauss-Newton step, with the Jacobian written out or by products with it alone."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil.attacks.newton_prior import Prior
from gradveil.attacks.newton_rows import TOGETHER, Rows


@dataclass(frozen=True)
class Dense:
    """Solve (Kᵀ V⁻¹ K + damping · Σ⁻¹) Δ = -slope with K of every problem written out."""

    prior: Prior

    def __call__(
        self, rows: Rows, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Return damping (B,) -> step (B, n); ``weights`` (B, R) are those of the squared residuals."""
        precision = self.prior.precision()
        normal, slope = [], []
        for part in torch.arange(len(x), device=x.device).split(max(1, TOGETHER // x.shape[1])):
            h, g = _normal_equations(rows.take(part), x[part], residual[part], weights[part], width[part])
            normal.append(h)
            slope.append(g)
        fall = torch.cat(slope) + self.prior.precise(x - self.prior.center())
        hessian = torch.cat(normal)

        def step(damping: Tensor) -> Tensor:
            factor, _ = torch.linalg.cholesky_ex(hessian + damping[:, None, None] * precision)
            return torch.cholesky_solve(-fall[..., None], factor)[..., 0]

        return step


def _normal_equations(rows: Rows, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor) -> tuple[Tensor, Tensor]:
    """Return Kᵀ V⁻¹ K (b, n, n) and Kᵀ V⁻¹ residual (b, n), summed over the parts that K comes in."""
    root, first = weights.sqrt()[:, None], 0
    normal, slope = x.new_zeros(*x.shape, x.shape[1]), x.new_zeros(*x.shape, 1)
    for part in rows.jacobian(x, width):  # (b, n, some of the rows)
        here = slice(first, first + part.shape[2])
        scaled = part * root[..., here]
        normal.baddbmm_(scaled, scaled.mT)
        slope.baddbmm_(scaled, (root[..., here] * residual[:, None, here]).mT)
        first = here.stop
    return normal, slope[..., 0]


@dataclass(frozen=True)
class MatrixFree:
    """The same by conjugate gradients, preconditioned by Σ, on products with K and Kᵀ."""

    prior: Prior
    iterations: int
    tolerance: float = 1e-3  # of the residual of the linear system

    def __call__(
        self, rows: Rows, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Return damping (B,) -> step (B, n); ``weights`` (B, R) are those of the squared residuals."""
        fall = rows.pull(x, weights * residual, width) + self.prior.precise(x - self.prior.center())

        def step(damping: Tensor) -> Tensor:
            def product(v: Tensor) -> Tensor:
                curved = rows.pull(x, weights * rows.push(x, v, width), width)
                return curved + damping[:, None] * self.prior.precise(v)

            return conjugate_gradients(product, -fall, self.prior.covary, self.iterations, self.tolerance)

        return step


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    iterations: int,
    tolerance: float,
) -> Tensor:
    """Solve A s = right (B, n) for symmetric positive A, every problem with its own step lengths."""
    s, r = torch.zeros_like(right), right.clone()
    z = precondition(r)
    p, rz = z, (r * z).sum(1)
    enough = tolerance**2 * rz
    for _ in range(iterations):
        live = rz > enough
        if not bool(live.any()):
            break
        ap = product(p)
        length = torch.where(live, rz / (p * ap).sum(1), 0.0)[:, None]
        s, r = s + length * p, r - length * ap
        z = precondition(r)
        fresh = (r * z).sum(1)
        p, rz = z + torch.where(live, fresh / rz, 0.0)[:, None] * p, torch.where(live, fresh, rz)
    return s
