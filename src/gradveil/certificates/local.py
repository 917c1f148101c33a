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

from gradveil.certificates.base import SCOPE, Certificate, Problem
from gradveil.certificates.norms import lanczos
from gradveil.certificates.region import norm, ratio
from gradveil.errors import CertificateError
from gradveil.layers import prefix

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
    else:
        size = summed_norms(back, r, problem.p)
        how = f"largest {'row' if problem.p == inf else 'column'} sum of |J|, exact"
        details = {"norm": size}
    details["distance"] = distance
    return Certificate(ratio(distance, size), "local", problem.p, problem.size, False, ASSUMPTIONS, how, details)


def linearised(f: LinearMap, x: Tensor) -> tuple[Tensor, LinearMap]:
    """Return f(x) and the map u -> Jᵀu, which can be called any number of times."""
    found: Any = vjp(f, x)
    return found[0], lambda u: found[1](u)[0]


def spectral_norms(back: LinearMap, x: Tensor, r: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return ||J||_2 per example (N,) and the relative residuals, from u -> Jᵀu alone.

    J v is the derivative of v·Jᵀu in u: the transpose of the transpose, so no forward pass is repeated.
    """
    _, forward = linearised(lambda u: back(u).flatten(1), torch.zeros_like(r))
    rng = torch.Generator(x.device).manual_seed(0)
    start = torch.randn(len(x), x[0].numel(), generator=rng, device=x.device, dtype=x.dtype)
    count = min(steps, x[0].numel(), r.shape[1] + 1)  # one more than the rank, for the part of the start that J kills
    size, residual = lanczos(forward, lambda u: back(u).flatten(1), start, count, TOLERANCE)
    return size.double(), residual.double()


def summed_norms(back: LinearMap, r: Tensor, p: float, chunk: int = 32) -> Tensor:
    """Return ||J||_p per example (N,) for p = 1 or inf, from all rows of the Jacobian."""
    n, length = r.shape
    columns: Tensor | float = 0.0
    largest = torch.zeros(n, dtype=torch.float64, device=r.device)
    for start in range(0, length, chunk):
        unit = torch.zeros(min(chunk, length - start), n, length, dtype=r.dtype, device=r.device)
        unit[torch.arange(len(unit)), :, start + torch.arange(len(unit))] = 1.0
        rows = vmap(back)(unit).flatten(2).abs().double()  # (chunk, N, d)
        columns = columns + rows.sum(0)
        largest = torch.maximum(largest, rows.sum(2).amax(0))
    return largest if p == inf or not isinstance(columns, Tensor) else columns.amax(1)
