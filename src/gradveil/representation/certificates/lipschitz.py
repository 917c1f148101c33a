"""Sound relatives of theorem 1: ||X - X′|| >= ||r - r′|| / Lip(f) for every preimage X′ of r′, no inverse needed.

Integrating the Jacobian along the segment from X to X′ gives ||f(X) - f(X′)||_p <= Lip_p(f) ||X - X′||_p on any
convex set (docs/theory/certificates.md, P1-P3). The kinds differ in the set and in how Lip is bounded.
"""

from collections.abc import Sequence
from math import prod, sqrt

import torch

from gradveil.errors import CertificateError
from gradveil.representation.certificates.base import RANGE, Certificate, Problem, Region, farthest
from gradveil.representation.certificates.bounds.chain import is_reshape
from gradveil.representation.certificates.bounds.intervals import box_lipschitz, propagate, tighten
from gradveil.representation.certificates.bounds.norms import Norm

MARGIN = 1 + 1e-9  # on every Lipschitz constant, for rounding
STEPS = 10  # of the search for a radius


def lipschitz(norms: Sequence[Norm]) -> float:
    """Return an upper bound of Lip_p(f) on the whole space: the product of the steps' norms."""
    return MARGIN * prod(norm.value for norm in norms)


def global_certificate(problem: Problem) -> Certificate:
    """P1 on the whole space: Lip from the product of the layers' operator norms."""
    norms = [n for n, step in zip(problem.norms, problem.chain.steps, strict=True) if not is_reshape(step)]
    lip = lipschitz(norms)
    kinds = sorted({n.kind for n in norms}) or ["exact"]
    how = f"Lip_{problem.p:g} <= {lip:.4g}, product of {len(norms)} norms ({', '.join(kinds)}): {problem.chain}"
    return _from_lipschitz(problem, "global", lip, how, problem.stated())


def box_certificate(problem: Problem) -> Certificate:
    """P1 on the data range: Lip from interval bounds of slopes and Jacobian; never looser than ``global``."""
    low, high = (torch.full_like(problem.x[:1], b, dtype=torch.float64) for b in problem.bounds)
    bound = box_lipschitz(problem.chain, propagate(problem.chain, low, high), problem.p) * MARGIN
    lip = min(bound, lipschitz(problem.norms))
    how = f"Lip_{problem.p:g} <= {lip:.4g} over the data range, by interval slopes and Jacobian: {problem.chain}"
    return _from_lipschitz(problem, "box", lip, how, problem.stated(RANGE.format(*problem.bounds)))


def residual_certificate(problem: Problem) -> Certificate:
    """P2: the bound for a server whose answer leaves a residual ||f(X′) - r′||_p of up to tau."""
    if problem.residual is None:
        raise CertificateError("kind='residual' needs residual=...: how far from r′ the server's answer stayed.")
    lip = lipschitz(problem.norms)
    sentence = "The server's answer X′ leaves a residual ||f(X′) - r′|| of at most the given tau."
    how = f"(||r - r′|| - tau)+ / Lip with Lip_{problem.p:g} <= {lip:.4g}"
    details = {"distance": problem.distance, "rounding": problem.rounding[0], "tau": problem.allowed}
    return Certificate(
        problem.nearest(lip), "residual", problem.p, problem.size, True, problem.stated(sentence), how, details
    )


def radius_certificate(problem: Problem) -> Certificate:
    """P3, the sound version of the paper's local bound: the largest R with R Lip(f; ball of radius R) < ||r - r′||."""
    start = box_certificate(problem)
    found = torch.stack([_radius(problem, i, float(start.bound[i])) for i in range(len(problem.x))])
    how = f"search over balls around X, slopes and Jacobian bounded on each: {problem.chain}"
    details = {"distance": problem.distance, "rounding": problem.rounding[0]}
    return Certificate(found, "radius", problem.p, problem.size, True, start.assumptions, how, details)


def _radius(problem: Problem, i: int, known: float) -> torch.Tensor:
    """Return the largest radius (a scalar) that the search proves for example i; ``known`` is proved already."""
    x, p, bounds = problem.x[i : i + 1], problem.p, problem.bounds
    low, high = known, float(farthest(x.double(), bounds, p))
    for _ in range(STEPS):
        if not 0 < low < high:
            break
        radius = sqrt(low * high)
        lip = box_lipschitz(problem.chain, tighten(problem.chain, Region.ball(x, p, radius, bounds)), p) * MARGIN
        inside = float(problem.nearest(lip)[i])
        proved = min(radius, inside)  # a preimage lies outside the ball, or this far from X inside it
        low = max(low, proved)
        high = high if proved == radius else radius
    return torch.tensor(low, dtype=torch.float64)


def _from_lipschitz(problem: Problem, kind: str, lip: float, how: str, stated: tuple[str, ...]) -> Certificate:
    bound = problem.nearest(lip)
    details = {"distance": problem.distance, "rounding": problem.rounding[0], "lipschitz": torch.full_like(bound, lip)}
    return Certificate(bound, kind, problem.p, problem.size, True, stated, how, details)  # type: ignore[arg-type]
