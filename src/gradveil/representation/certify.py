"""``certify``: how far a server's answer must be from the input, by every kind of bound.

``local`` is theorem 1 of Sun et al. 2020 as it is written, ||r - r′||_p / ||∇_X f||_p. It is first order: the proof
replaces f⁻¹ by its Taylor expansion at r and asks for an inverse that f seldom has, so the figure is an estimate and
can exceed the largest distance two images can have. Its sound relatives (P1, P2) need no inverse: integrating J
along the segment from X to X′ gives ||f(X) - f(X′)||_p <= Lip_p(f) ||X - X′||_p on any convex set, so that
||X - X′|| >= ||r - r′|| / Lip(f) for every preimage X′ of r′; the kinds differ in the set and in how Lip is bounded.
``reach`` (P3) compares r′ with bounds of f over the whole data range, and looks along one direction c: if c·f stays
below c·r′ - tau ||c||_dual on the ball of radius R, no image in the ball comes within tau of r′. Here f is what the
model computes, rounding included. Proofs: docs/theory/certificates.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import cos, inf, pi, prod, sqrt
from typing import get_args

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import CertificateError, did_you_mean
from gradveil.gradients.functional import quiet
from gradveil.modules import prefix
from gradveil.representation.intervals import (
    Region,
    box_lipschitz,
    plane,
    propagate,
    pull_rounding,
    pull_rows,
    tighten,
)
from gradveil.representation.jacobian import FunctionJacobian, Jacobian
from gradveil.representation.norms import ROUNDING, Norm, dual_norm, farthest, lanczos, norm, ratio
from gradveil.representation.problem import RANGE, SCOPE, Certificate, Kind, Problem, is_reshape
from gradveil.representation.rules.activations import Interval
from gradveil.representation.scores import row_norms

MARGIN = 1 + 1e-9  # on every Lipschitz constant, for rounding


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
    found = global_certificate(problem)
    stated = problem.stated("The server's answer X′ leaves a residual ||f(X′) - r′|| of at most the given tau.")
    how = f"(||r - r′|| - tau)+ / Lip with {found.how}"
    details = found.details | {"tau": problem.allowed}
    return replace(found, kind="residual", assumptions=stated, how=how, details=details)


def _from_lipschitz(problem: Problem, kind: str, lip: float, how: str, stated: tuple[str, ...]) -> Certificate:
    bound = problem.nearest(lip)
    details = {"distance": problem.distance, "rounding": problem.rounding[0], "lipschitz": torch.full_like(bound, lip)}
    return Certificate(bound, kind, problem.p, problem.size, True, stated, how, details)  # type: ignore[arg-type]


LANCZOS_STEPS = 40  # of Lanczos, at most
TOLERANCE = 5e-3  # on the relative residual of ||J||², far above the error of ||J|| itself
FIRST_ORDER = (
    "A first-order estimate, not a certificate: f is replaced by its linearisation at X.",
    "f has an inverse on r and r′ (the paper's assumption 1); networks whose r is shorter or longer than X have none.",
    SCOPE,
)


Map = Callable[[Tensor], Tensor]


def local_certificate(problem: Problem) -> Certificate:
    """Return ||r - r′||_p / ||J(X)||_p per example; p = 2 by Lanczos, p = 1 and inf exactly."""
    if torch.finfo(problem.x.dtype).bits < 32:
        raise CertificateError(
            f"In {problem.x.dtype} r - r′ is mostly rounding. Give the model and its inputs in float32: model.float()."
        )
    with quiet(problem.model):
        problem.check_function()
        return _from_jacobian(problem, FunctionJacobian(problem.model, problem.layer, problem.x))


def _from_jacobian(problem: Problem, jacobian: FunctionJacobian) -> Certificate:
    r = jacobian.r.detach().flatten(1)
    if r.shape != problem.r_perturbed.shape:
        raise CertificateError(
            f"Layer {problem.layer!r} takes {tuple(r.shape)} for these inputs; "
            f"r_perturbed is {tuple(problem.r_perturbed.shape)}."
        )
    distance = norm((r - problem.r_perturbed).double(), problem.p)
    if problem.p == 2:
        size, residual = spectral_norms(jacobian, LANCZOS_STEPS)
        how = (
            f"Lanczos, at most {LANCZOS_STEPS} steps, from below; largest relative residual {float(residual.max()):.1e}"
        )
        details = {"norm": size, "residual": residual}
    elif problem.p == inf:
        _, rows = row_norms(problem.model, problem.layer, problem.x, p=1.0)
        size, how = rows.flatten(1).amax(1).double(), "largest row sum of |J|, exact"
        details = {"norm": size}
    else:
        size, how = column_sums(jacobian).amax(1), "largest column sum of |J|, exact"
        details = {"norm": size}
    details["distance"] = distance
    return Certificate(ratio(distance, size), "local", problem.p, problem.size, False, FIRST_ORDER, how, details)


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


def column_sums(jacobian: Jacobian) -> Tensor:
    """Return the column sums of |J| per example (N, d), from all rows of the Jacobian."""
    shape = jacobian.r.shape
    units = torch.eye(shape[1:].numel(), dtype=jacobian.r.dtype, device=jacobian.r.device).split(32)
    rows = [jacobian.pull(some.reshape(-1, 1, *shape[1:]).expand(-1, *shape)).flatten(2) for some in units]
    return torch.stack([part.abs().sum(0, dtype=torch.float64) for part in rows]).sum(0)


REACH_STEPS = 10  # of the search for a radius


def reach_certificate(problem: Problem) -> Certificate:
    """Return the proved radius per example, inf where no image in the data range has r′ as its representation."""
    least = least_residual(problem)
    unreachable = least > problem.allowed
    radii = [
        torch.tensor(torch.inf, dtype=torch.float64) if bool(unreachable[i]) else _reach_radius(problem, i)
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


def _reach_radius(problem: Problem, i: int) -> Tensor:
    """Return the largest radius that the search proves for example i (0 where it proves none)."""
    x = problem.x[i : i + 1]
    low, high = 0.0, float(farthest(x.double(), problem.bounds, problem.p))
    if _excluded(problem, i, high):
        return torch.tensor(torch.inf, dtype=torch.float64)
    radius = high / 64
    for _ in range(REACH_STEPS):
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


STEPS, RESTARTS = 300, 2  # of an inversion
SEARCHED_ONLY = (
    "Not a bound: the distance that one search reached; a better search may come nearer or find another image.",
    "The search minimises ||f(X′) - r′||_2 over the data range and is chosen by that objective, never by the truth.",
)


def empirical_certificate(problem: Problem) -> Certificate:
    """Invert r′ by Adam from several starts."""
    with quiet(problem.model):
        problem.check_function()
        found, residual = invert(problem)
    off = (found - problem.x).double()
    details = {"residual": residual, "mse": off.square().flatten(1).mean(1)}
    how = f"Adam on r′, {STEPS} steps, best of {RESTARTS} starts by residual"
    return Certificate(norm(off, problem.p), "empirical", problem.p, problem.size, False, SEARCHED_ONLY, how, details)


def invert(problem: Problem, steps: int = STEPS, restarts: int = RESTARTS, lr: float = 0.1) -> tuple[Tensor, Tensor]:
    """Return the best image (N, *shape) in the data range for each r′, and its residual (N,)."""
    rng = problem.rng or Generator(problem.x.device).manual_seed(0)
    f, n = prefix(problem.model, problem.layer), len(problem.x)
    low, high = problem.bounds
    shape = (restarts * n, *problem.x.shape[1:])
    x = torch.rand(shape, generator=rng, device=problem.x.device, dtype=problem.x.dtype) * (high - low) + low
    target = problem.r_perturbed.to(x.dtype).repeat(restarts, 1)
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        x.requires_grad_()
        loss = (f(x).flatten(1) - target).square().sum()
        (grad,) = torch.autograd.grad(loss, x)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        sizes = first / (1 - 0.9 ** (step + 1)) / ((second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
        pace = lr * (high - low) * (1 + cos(pi * step / steps)) / 2
        x = (x.detach() - pace * sizes).clamp(low, high)
    with torch.no_grad():
        residual = (f(x).flatten(1) - target).norm(dim=1).reshape(restarts, n)
    best = residual.argmin(0)
    return x.reshape(restarts, *problem.x.shape)[best, torch.arange(n)], residual.amin(0).double()


KINDS: dict[Kind, Callable[[Problem], Certificate]] = {
    "local": local_certificate,
    "global": global_certificate,
    "box": box_certificate,
    "reach": reach_certificate,
    "residual": residual_certificate,
    "empirical": empirical_certificate,
}


def certify(
    model: nn.Module,
    layer: str | None,
    x: Tensor,  # (N, *shape)
    r_perturbed: Tensor,  # (N, L), what the layer's weight gradient is built from
    p: float = 2,
    kind: Kind = "global",
    *,
    bounds: tuple[float, float] = (0.0, 1.0),
    residual: float | Tensor | None = None,
    rng: Generator | None = None,
) -> Certificate:
    """Return how far from x every image with the representation r′ must be, in the p-norm, and on what that rests.

    ``local`` is the paper's theorem 1 (first order), ``global`` and ``box`` its sound versions (a Lipschitz constant on
    the whole space, on the data range), ``reach`` asks whether any image at all can have r′ and how near, ``residual``
    is for a server that stays ``residual`` away from r′, and ``empirical`` is what an inversion of r′ reaches.
    ``layer=None`` takes the last fully connected layer.
    """
    if kind not in KINDS:
        known = get_args(Kind)
        raise CertificateError(
            f"No certificate is of kind {kind!r}. {did_you_mean(str(kind), known)}Known: {', '.join(known)}."
        )
    tau = None if residual is None else torch.as_tensor(residual, dtype=torch.float64).expand(len(x))
    problem = Problem.make(model, layer, x, r_perturbed, p, bounds=bounds, residual=tau, rng=rng)
    return KINDS[kind](problem)


PROPORTIONAL = ("local", "global", "box")  # kinds whose bound is ||r - r′|| over a number that r′ does not change


@dataclass(frozen=True)
class Needed:
    """How many entries of each example must go for its certificate to reach the target."""

    counts: Tensor  # (N,): L + 1 where zeroing all of r is not enough
    length: int  # L
    most: Tensor  # (N,): the mean squared error that zeroing all of r certifies

    @property
    def reachable(self) -> bool:
        """Whether some share reaches the target for every example."""
        return int(self.counts.max()) <= self.length


def needed_counts(
    model: nn.Module,
    layer: str,
    x: Tensor,  # (N, *shape)
    r: Tensor,  # (N, L)
    order: Tensor,  # (N, L): which entry of each row goes first, second, ...
    target_mse: float,
    kind: Kind = "global",
    p: float = 2,
) -> Needed:
    """Return the fewest entries of each example, in the given order, whose certificate reaches the target."""
    if kind not in PROPORTIONAL:
        raise CertificateError(
            f"A target needs a bound that depends on the share alone; {kind!r} is none. "
            f"Use one of: {', '.join(PROPORTIONAL)}."
        )
    r, order = r.detach().cpu(), order.cpu()
    problem = Problem.make(model, layer, x, torch.zeros_like(r), p)
    whole = KINDS[kind](problem)
    if target_mse <= 0:
        counts = torch.zeros(len(r), dtype=torch.int64)
    else:
        lost = whole.details.get("rounding", torch.zeros(len(r), dtype=torch.float64))
        rest = (whole.details["distance"] - lost).clamp_min(1e-300)
        per_unit = whole.bound / rest  # (N,)
        left = (_distances(problem.r, r, order, p) - lost[:, None]).clamp_min(0)
        reached = left * per_unit[:, None]  # (N, L): the bound after k entries
        wanted = sqrt(target_mse) * (whole.size if p == 1 else sqrt(whole.size))
        counts = (reached < wanted).sum(1) + 1
    return Needed(counts, r.shape[1], whole.to_mse())


def _distances(exact: Tensor, r: Tensor, order: Tensor, p: float) -> Tensor:
    """Return ||r - r′||_p (N, L) after 1, 2, ... entries, as ``Problem.distance`` has it: r′ comes from rounded r."""
    gone = exact.gather(1, order).abs()
    off = (exact - r.double()).gather(1, order).abs()  # of the entries kept: rounding in the forward pass
    left = torch.cat([off[:, 1:], torch.zeros_like(off[:, :1])], 1).flip(1)
    if p == inf:
        found = torch.maximum(gone.cummax(1).values, left.cummax(1).values.flip(1))
    else:
        found = (gone.pow(p).cumsum(1) + left.pow(p).cumsum(1).flip(1)).pow(1 / p)
    return (found - 2 * ROUNDING * norm(exact, p)[:, None]).clamp_min(0)


def readable_p(text: str) -> float:
    """Read p from text: 1, 2 or inf."""
    try:
        return {"1": 1.0, "2": 2.0, "inf": inf}[text.strip().lower()]
    except KeyError:
        raise CertificateError(f"p is {text!r}; certificates know p = 1, 2 and inf.") from None
