"""Can any image have the representation r′? And if one may, how far from X must it be at least? (P4)

The verdict compares r′ with bounds of f over the whole data range. The radius looks along one direction c: if
c·f stays below c·r′ - tau ||c||_dual on the ball of radius R, no image in the ball comes within tau of r′. Here f is
what the model computes, rounding included.
"""

from math import cos, pi, sqrt

import torch
from torch import Generator, Tensor

from gradveil.gradients.functional import quiet
from gradveil.modules import prefix
from gradveil.representation.certificates.base import RANGE, Certificate, Problem, Region, dual_norm, farthest, norm
from gradveil.representation.certificates.bounds.intervals import plane, propagate, pull_rounding, pull_rows, tighten
from gradveil.representation.layers.rules.activations import Interval

STEPS = 10  # of the search for a radius


def reach_certificate(problem: Problem) -> Certificate:
    """Return the proved radius per example, inf where no image in the data range has r′ as its representation."""
    least = least_residual(problem)
    unreachable = least > problem.allowed
    radii = [
        torch.tensor(torch.inf, dtype=torch.float64) if bool(unreachable[i]) else _radius(problem, i)
        for i in range(len(problem.x))
    ]
    tau = "" if problem.residual is None else " The server's answer may leave a residual of up to the given tau."
    how = f"interval and linear bounds of f, radius along r′ - r: {problem.chain}"
    details = {
        "distance": problem.distance,
        "least_residual": least,
        "unreachable": unreachable.double(),
        "tau": problem.allowed,
    }
    stated = problem.stated(RANGE.format(*problem.bounds) + tau)
    return Certificate(torch.stack(radii), "reach", problem.p, problem.size, True, stated, how, details)


def least_residual(problem: Problem) -> Tensor:
    """Return a lower bound (N,) of ||f(X′) - r′||_p over every image X′ in the data range.

    The largest of three: how far r′ lies outside the interval bounds of f, outside the tighter linear ones, and
    beyond the highest value that f takes along r′ - r.
    """
    whole = Region.whole(problem.x[:1], problem.bounds)
    wide = propagate(problem.chain, whole.lower, whole.upper)
    tight = tighten(problem.chain, whole)
    c = problem.r_perturbed.double() - problem.r
    beyond = (c * problem.r_perturbed).sum(1) - whole.highest(*plane(problem.chain, tight, c))
    along = torch.where(c.any(1), beyond / dual_norm(c, problem.p).clamp_min(1e-300), 0.0).clamp_min(0)
    return torch.stack([_outside(problem, wide[-1]), _outside(problem, tight[-1]), along]).amax(0)


def _outside(problem: Problem, r_bounds: Interval) -> Tensor:
    low, high = (b.flatten(1) for b in r_bounds)
    target = problem.r_perturbed.double()
    return norm(torch.relu(low - target) + torch.relu(target - high), problem.p)


def _radius(problem: Problem, i: int) -> Tensor:
    """Return the largest radius that the search proves for example i (0 where it proves none)."""
    x = problem.x[i : i + 1]
    low, high = 0.0, float(farthest(x.double(), problem.bounds, problem.p))
    if _excluded(problem, i, high):
        return torch.tensor(torch.inf, dtype=torch.float64)
    radius = high / 64
    for _ in range(STEPS):
        if _excluded(problem, i, radius):
            low = radius
        else:
            high = radius
        radius = sqrt(low * high) if low > 0 else high / 8
    return torch.tensor(low, dtype=torch.float64)


def _excluded(problem: Problem, i: int, radius: float) -> bool:
    """Return whether it is proved that no image within the radius comes within tau of r′."""
    r, target = problem.r[i : i + 1], problem.r_perturbed[i : i + 1].double()
    c = target - r
    region = Region.ball(problem.x[i : i + 1], problem.p, radius, problem.bounds)
    bounds = tighten(problem.chain, region)
    wanted = float((c * c).sum() - problem.allowed[i] * dual_norm(c, problem.p)[0])
    by_plane = float(region.highest(*plane(problem.chain, bounds, c))[0]) - float((c * r).sum())
    centre, spread = pull_rows(problem.chain, bounds, c)
    rounding = float(pull_rounding(problem.chain, bounds, c)[0])
    by_slope = radius * float(dual_norm(centre.abs() + spread, problem.p)[0]) + rounding
    margin = 1e-9 * (abs(wanted) + float((c * r).abs().sum()))
    return min(by_plane, by_slope) + margin < wanted


ASSUMPTIONS = (
    "Not a bound: the distance that one search reached; a better search may come nearer or find another image.",
    "The search minimises ||f(X′) - r′||_2 over the data range and is chosen by that objective, never by the truth.",
)


def empirical_certificate(
    problem: Problem, steps: int = 300, restarts: int = 2, lr: float = 0.1, mask_aware: bool = False
) -> Certificate:
    """Invert r′ by Adam from several starts; ``mask_aware`` matches only the entries that r′ left non-zero."""
    weight = (problem.r_perturbed != 0).to(problem.x.dtype) if mask_aware else torch.ones_like(problem.r_perturbed)
    with quiet(problem.model):
        problem.check_function()
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
