"""What an actual inversion of r′ reaches: the upper side of every bound, so that the gap is seen."""

from math import cos, pi

import torch
from torch import Generator, Tensor

from gradveil.certificates.base import Certificate, Problem
from gradveil.certificates.region import norm
from gradveil.layers import prefix

ASSUMPTIONS = (
    "Not a bound: the distance that one search reached; a better search may come nearer or find another image.",
    "The search minimises ||f(X′) - r′||_2 over the data range and is chosen by that objective, never by the truth.",
)


def empirical_certificate(
    problem: Problem, steps: int = 300, restarts: int = 2, lr: float = 0.1, mask_aware: bool = False
) -> Certificate:
    """Invert r′ by Adam from several starts; ``mask_aware`` matches only the entries that r′ left non-zero."""
    weight = (problem.r_perturbed != 0).to(problem.x.dtype) if mask_aware else torch.ones_like(problem.r_perturbed)
    found, residual = invert(problem, weight.to(problem.x.dtype), steps, restarts, lr)
    distance = norm((found - problem.x).double(), problem.p)
    details = {"residual": residual, "mse": ((found - problem.x).double() ** 2).flatten(1).mean(1)}
    matched = "kept entries" if mask_aware else "r′"
    how = f"Adam on the {matched}, {steps} steps, best of {restarts} starts by residual"
    return Certificate(distance, "empirical", problem.p, problem.size, False, ASSUMPTIONS, how, details)


def invert(problem: Problem, weight: Tensor, steps: int, restarts: int, lr: float) -> tuple[Tensor, Tensor]:
    """Return the best image (N, *shape) in the data range for each r′, and its residual (N,)."""
    rng = problem.rng or Generator(problem.x.device).manual_seed(0)
    f, n = prefix(problem.model, problem.layer), len(problem.x)
    low, high = problem.bounds
    shape = (restarts * n, *problem.x.shape[1:])
    x = torch.rand(shape, generator=rng, device=problem.x.device, dtype=problem.x.dtype) * (high - low) + low
    target, weight = (t.to(x.dtype).repeat(restarts, 1) for t in (problem.r_perturbed, weight))
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        x.requires_grad_()
        loss = (weight * (f(x).flatten(1) - target)).square().sum()
        (grad,) = torch.autograd.grad(loss, x)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        sizes = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
        pace = lr * (high - low) * (1 + cos(pi * step / steps)) / 2
        x = (x.detach() - pace * sizes).clamp(low, high)
    with torch.no_grad():
        residual = (weight * (f(x).flatten(1) - target)).norm(dim=1).reshape(restarts, n)
    best = residual.argmin(0)
    return x.reshape(restarts, *problem.x.shape)[best, torch.arange(n)], residual.amin(0).double()
