"""The paper's theorem 1 as it is written: ||r - r′||_p / ||∇_X f||_p, with the operator norm of the Jacobian at X.

Sun et al. 2020, theorem 1. First order: the proof replaces f⁻¹ by its Taylor expansion at r and asks for an
inverse that f seldom has, so the figure is an estimate and can exceed the largest distance two images can have.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap

from gradveil.certificates.base import SCOPE, Certificate, Problem, norm, ratio
from gradveil.certificates.bounds.norms import lanczos
from gradveil.errors import CertificateError
from gradveil.layers.modules import prefix
from gradveil.scores import row_norms

STEPS = 40  # of Lanczos, at most
TOLERANCE = 5e-3  # on the relative residual of ||J||², far above the error of ||J|| itself
ASSUMPTIONS = (
    "A first-order estimate, not a certificate: f is replaced by its linearisation at X.",
    "f has an inverse on r and r′ (the paper's assumption 1); networks whose r is shorter or longer than X have none.",
    SCOPE,
)

LinearMap = Callable[[Tensor], Tensor]


def local_certificate(problem: Problem, steps: int = STEPS) -> Certificate:
    """Return ||r - r′||_p / ||J(X)||_p per example; p = 2 by Lanczos, p = 1 and inf exactly."""
    f = prefix(problem.model, problem.layer)
    r, back = linearised(lambda x: f(x).flatten(1), problem.x.detach())
    if r.shape != problem.r_perturbed.shape:
        raise CertificateError(
            f"Layer {problem.layer!r} takes {tuple(r.shape)} for these inputs; "
            f"r_perturbed is {tuple(problem.r_perturbed.shape)}."
        )
    distance = norm((r - problem.r_perturbed).double(), problem.p)
    if problem.p == 2:
        size, residual = spectral_norms(back, problem.x, r, steps)
        how = f"Lanczos, at most {steps} steps, from below; largest relative residual {float(residual.max()):.1e}"
        details = {"norm": size, "residual": residual}
    elif problem.p == inf:
        _, rows = row_norms(problem.model, problem.layer, problem.x, p=1.0)
        size, how = rows.flatten(1).amax(1).double(), "largest row sum of |J|, exact"
        details = {"norm": size}
    else:
        size, how = column_sums(back, r).amax(1), "largest column sum of |J|, exact"
        details = {"norm": size}
    details["distance"] = distance
    return Certificate(ratio(distance, size), "local", problem.p, problem.size, False, ASSUMPTIONS, how, details)


def linearised(f: LinearMap, x: Tensor) -> tuple[Tensor, LinearMap]:
    """Return f(x) and the map u -> Jᵀu, which can be called any number of times."""
    found: Any = vjp(f, x)
    return found[0], lambda u: found[1](u)[0]


def spectral_norms(back: LinearMap, x: Tensor, r: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return ||J||_2 per example (N,) and the relative residuals, from u -> Jᵀu alone.

    J v is the derivative of v·Jᵀu in u: the transpose of the transpose, so no forward pass is repeated. Lanczos runs
    in the shorter of the two spaces, on JJᵀ or JᵀJ: the largest eigenvalue is the same.
    """
    _, forward = linearised(lambda u: back(u).flatten(1), torch.zeros_like(r))
    rng = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(r.shape, generator=rng, device=r.device, dtype=r.dtype)
    size = r.norm(dim=1, keepdim=True).clamp_min(1e-6) / r.shape[1] ** 0.5
    start, there, again = r + size * noise, lambda u: back(u).flatten(1), forward
    if x[0].numel() < r.shape[1]:
        start, there, again = there(start), forward, there
        start = torch.where(start.any(1, keepdim=True), start, torch.ones_like(start))
    count = min(steps, start.shape[1])
    size, residual = lanczos(there, again, start, count, TOLERANCE)
    return size.double(), residual.double()


def column_sums(back: LinearMap, r: Tensor, chunk: int = 32) -> Tensor:
    """Return the column sums of |J| per example (N, d), from all rows of the Jacobian."""
    n, length = r.shape
    sums: list[Tensor] = []
    for start in range(0, length, chunk):
        unit = torch.zeros(min(chunk, length - start), n, length, dtype=r.dtype, device=r.device)
        unit[torch.arange(len(unit)), :, start + torch.arange(len(unit))] = 1.0
        sums.append(vmap(back)(unit).flatten(2).abs().sum(0, dtype=torch.float64))  # (N, d)
    return torch.stack(sums).sum(0)
