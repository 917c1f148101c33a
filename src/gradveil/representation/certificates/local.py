"""The paper's theorem 1 as it is written: ||r - r′||_p / ||∇_X f||_p, with the operator norm of the Jacobian at X.

Sun et al. 2020, theorem 1. First order: the proof replaces f⁻¹ by its Taylor expansion at r and asks for an
inverse that f seldom has, so the figure is an estimate and can exceed the largest distance two images can have.
"""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from gradveil.errors import CertificateError
from gradveil.gradients.functional import quiet
from gradveil.representation.certificates.base import SCOPE, Certificate, Problem, norm, ratio
from gradveil.representation.certificates.bounds.norms import lanczos
from gradveil.representation.layers.jacobian import FunctionJacobian, Jacobian
from gradveil.representation.scores import row_norms

STEPS = 40  # of Lanczos, at most
TOLERANCE = 5e-3  # on the relative residual of ||J||², far above the error of ||J|| itself
ASSUMPTIONS = (
    "A first-order estimate, not a certificate: f is replaced by its linearisation at X.",
    "f has an inverse on r and r′ (the paper's assumption 1); networks whose r is shorter or longer than X have none.",
    SCOPE,
)


Map = Callable[[Tensor], Tensor]


def local_certificate(problem: Problem, steps: int = STEPS) -> Certificate:
    """Return ||r - r′||_p / ||J(X)||_p per example; p = 2 by Lanczos, p = 1 and inf exactly."""
    if torch.finfo(problem.x.dtype).bits < 32:
        raise CertificateError(
            f"In {problem.x.dtype} r - r′ is mostly rounding. Give the model and its inputs in float32: model.float()."
        )
    with quiet(problem.model):
        problem.check_function()
        return _from_jacobian(problem, FunctionJacobian(problem.model, problem.layer, problem.x), steps)


def _from_jacobian(problem: Problem, jacobian: FunctionJacobian, steps: int) -> Certificate:
    r = jacobian.r.detach().flatten(1)
    if r.shape != problem.r_perturbed.shape:
        raise CertificateError(
            f"Layer {problem.layer!r} takes {tuple(r.shape)} for these inputs; "
            f"r_perturbed is {tuple(problem.r_perturbed.shape)}."
        )
    distance = norm((r - problem.r_perturbed).double(), problem.p)
    if problem.p == 2:
        size, residual = spectral_norms(jacobian, steps)
        how = f"Lanczos, at most {steps} steps, from below; largest relative residual {float(residual.max()):.1e}"
        details = {"norm": size, "residual": residual}
    elif problem.p == inf:
        _, rows = row_norms(problem.model, problem.layer, problem.x, p=1.0)
        size, how = rows.flatten(1).amax(1).double(), "largest row sum of |J|, exact"
        details = {"norm": size}
    else:
        size, how = column_sums(jacobian).amax(1), "largest column sum of |J|, exact"
        details = {"norm": size}
    details["distance"] = distance
    return Certificate(ratio(distance, size), "local", problem.p, problem.size, False, ASSUMPTIONS, how, details)


def spectral_norms(jacobian: Jacobian, steps: int) -> tuple[Tensor, Tensor]:
    """Return ||J||_2 per example (N,) and the relative residuals.

    Lanczos runs in the shorter of the two spaces, on JJᵀ or JᵀJ: the largest eigenvalue is the same.
    """
    x, r = jacobian.x, jacobian.r.detach().flatten(1)

    def back(u: Tensor) -> Tensor:
        return jacobian.pull(u.reshape(1, *jacobian.r.shape))[0].flatten(1)

    def forward(v: Tensor) -> Tensor:
        return jacobian.push(v.reshape(1, *x.shape))[0].flatten(1)

    rng = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(r.shape, generator=rng, device=r.device, dtype=r.dtype)
    size = r.norm(dim=1, keepdim=True).clamp_min(1e-6) / r.shape[1] ** 0.5
    start = r + size * noise
    maps: tuple[Map, Map] = (back, forward)
    if x[0].numel() < r.shape[1]:
        start, maps = back(start), (forward, back)
        start = torch.where(start.any(1, keepdim=True), start, torch.ones_like(start))
    size, residual = lanczos(*maps, start, min(steps, start.shape[1]), TOLERANCE)
    return size.double(), residual.double()


def column_sums(jacobian: Jacobian, chunk: int = 32) -> Tensor:
    """Return the column sums of |J| per example (N, d), from all rows of the Jacobian."""
    shape = jacobian.r.shape
    units = torch.eye(shape[1:].numel(), dtype=jacobian.r.dtype, device=jacobian.r.device).split(chunk)
    rows = [jacobian.pull(some.reshape(-1, 1, *shape[1:]).expand(-1, *shape)).flatten(2) for some in units]
    return torch.stack([part.abs().sum(0, dtype=torch.float64) for part in rows]).sum(0)
