"""Interval bounds: what a chain's values and its Jacobian can be while the input stays in a box.

Values by interval arithmetic step by step, widened by what the model may round; slopes of every activation from
its interval; the Jacobian as [centre - radius, centre + radius], pulled back from the representation to the input
with |A| for the radius.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gradveil.representation.norms import ROUNDING, dual_norm, operator_norm, slack, spectral
from gradveil.representation.problem import StepChain, is_reshape
from gradveil.representation.rules.activations import Curve, Interval, Pointwise
from gradveil.representation.rules.base import Affine, Step
from gradveil.representation.rules.windows import MaxPool


@dataclass(frozen=True)
class Region:
    """The p-ball of radius R around x, cut to the data range; without a radius the whole range."""

    x: Tensor  # (1, *shape) float64
    lower: Tensor  # (1, *shape): the smallest box around the region
    upper: Tensor
    p: float
    radius: float

    @classmethod
    def whole(cls, x: Tensor, bounds: tuple[float, float]) -> "Region":
        x = x.to(torch.float64)
        return cls(x, torch.full_like(x, bounds[0]), torch.full_like(x, bounds[1]), inf, inf)

    @classmethod
    def ball(cls, x: Tensor, p: float, radius: float, bounds: tuple[float, float]) -> "Region":
        """Return the ball around x (1, *shape), cut to the data range."""
        x = x.to(torch.float64)
        return cls(x, (x - radius).clamp(*bounds), (x + radius).clamp(*bounds), p, radius)

    def highest(self, rows: Tensor, constant: Tensor) -> Tensor:
        """Return the largest value (M,) that planes rows·x + constant take here, widened for rounding."""
        lower, upper = self.lower.flatten(1), self.upper.flatten(1)
        corner = torch.where(rows > 0, upper, lower)
        top = (rows * corner).sum(1)
        if self.p != inf:
            at_centre = rows @ self.x.flatten()
            top = torch.minimum(top, at_centre + self.radius * dual_norm(rows, self.p))
        wide = (rows.abs() * corner.abs()).sum(1) + constant.abs()
        return top + constant + (ROUNDING + rows.shape[1] * 2.0**-52) * wide


def exact_range(step: Step, lower: Tensor, upper: Tensor) -> Interval:
    """Return bounds of the step's exact output (N, *out_shape) while its input lies between the given ones."""
    if isinstance(step, Pointwise):
        return step.curve.values(lower, upper)
    if isinstance(step, MaxPool) or is_reshape(step):
        return step(lower), step(upper)  # monotone in every entry
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    centre, radius = step(middle), _affine(step).linear(half, absolute=True)
    return centre - radius, centre + radius


def _affine(step: Step) -> Affine:
    assert isinstance(step, Affine)  # a chain holds these, pooling and activations
    return step


def rounded(chain: StepChain, at: int, bounds: Interval) -> Tensor:
    """Return how far a computed output of step ``at`` can be from the exact one, its input within the bounds."""
    lower, upper = bounds
    return slack(chain.steps[at], torch.maximum(lower.abs(), upper.abs()), chain.precision)


def push(chain: StepChain, at: int, bounds: Interval) -> Interval:
    """Return bounds of what the model computes in step ``at`` while its input lies within the given ones."""
    low, high = exact_range(chain.steps[at], *bounds)
    wide = rounded(chain, at, bounds)
    return low - wide, high + wide


def propagate(chain: StepChain, lower: Tensor, upper: Tensor) -> list[Interval]:
    """Return the bounds before every step, and last those of r itself, as the model computes them."""
    bounds = [(lower.to(torch.float64), upper.to(torch.float64))]
    for at in range(len(chain.steps)):
        bounds.append(push(chain, at, bounds[-1]))
    return bounds


def pull(step: Step, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Return centre and radius of rowᵀ J for rows (M, *out_shape) given as centre and radius.

    ``lower`` and ``upper`` bound the step's input: one box for all rows (1, *in_shape) or one each.
    """
    if isinstance(step, Pointwise):
        return _times(centre, radius, *step.curve.slopes(lower, upper))
    if not isinstance(step, MaxPool):
        return _affine(step).transposed(centre), _affine(step).transposed(radius, absolute=True)
    low, high = step.windows(lower), step.windows(upper)  # (., C, window, windows)
    best, second = low.max(dim=2, keepdim=True).values, high.topk(min(2, high.shape[2]), dim=2).values
    rival = torch.where(high == second[:, :, :1], second[:, :, -1:], second[:, :, :1])  # best of the others
    alone = high.shape[2] == 1
    can_win = (high >= best).to(low.dtype)
    must_win = torch.ones_like(low) if alone else (low > rival).to(low.dtype)
    flat = (len(centre), step.out_shape[0], 1, -1)
    c, r = _times(centre.reshape(flat), radius.reshape(flat), must_win, can_win)
    return step.gather(c), step.gather(r)


def _times(centre: Tensor, radius: Tensor, low: Tensor, high: Tensor) -> Interval:
    middle, half = (low + high) / 2, (high - low) / 2
    return centre * middle, centre.abs() * half + radius * (middle.abs() + half)


def pull_rows(chain: StepChain, bounds: list[Interval], rows: Tensor) -> Interval:
    """Return centre and radius of rowᵀ J (M, d) over the boxes, for rows (M, L)."""
    *_, (centre, radius) = _pulled(chain, bounds, rows)
    return centre.flatten(1), radius.flatten(1)


def pull_rounding(chain: StepChain, bounds: list[Interval], rows: Tensor) -> Tensor:
    """Return how far rowᵀ of the computed r can be from rowᵀ of the exact one (M,), over the boxes.

    Step by step the computed value is put in the place of the exact one; what that changes at the end is the Jacobian
    of the steps after it, between two points of the same box, times the step's own rounding.
    """
    total = torch.zeros(len(rows), dtype=torch.float64)
    for at, (centre, radius) in zip(reversed(range(len(chain.steps))), _pulled(chain, bounds, rows), strict=False):
        total = total + ((centre.abs() + radius) * rounded(chain, at, bounds[at])).flatten(1).sum(1)
    return total


def _pulled(chain: StepChain, bounds: list[Interval], rows: Tensor) -> Iterator[Interval]:
    """Yield centre and radius of the rows at r, before the last step, and so on down to the input."""
    shape = chain.steps[-1].out_shape if chain.steps else chain.in_shape
    centre = rows.reshape(len(rows), *shape).to(torch.float64)
    radius = torch.zeros_like(centre)
    yield centre, radius
    for step, (lower, upper) in zip(reversed(chain.steps), reversed(bounds[:-1]), strict=True):
        centre, radius = pull(step, centre, radius, lower, upper)
        yield centre, radius


def unit_rows(size: int, chunk: int = 64) -> Iterator[Tensor]:
    """Yield the identity matrix some rows at a time."""
    for start in range(0, size, chunk):
        rows = torch.zeros(min(chunk, size - start), size, dtype=torch.float64)
        rows[:, start:].fill_diagonal_(1.0)
        yield rows


def box_lipschitz(chain: StepChain, bounds: list[Interval], p: float) -> float:
    """Return an upper bound of Lip_p(f) over one box, from the bounds that ``propagate`` found for it.

    p = 1 and inf: column and row sums of |centre| + radius. p = 2: the least of ||centre|| + ||radius||, of
    || |centre| + radius ||, and of the product of the steps' norms with the slopes that the box allows.
    """
    product = slope_product(chain, bounds, p)
    rows = (pull_rows(chain, bounds, unit) for unit in unit_rows(chain.out_size))
    if p == inf:
        sums = ((c.abs() + r).sum(1) for c, r in rows)
        return min(product, max(float(s.max()) for s in sums))
    parts = list(rows)
    centre, radius = torch.cat([c for c, _ in parts]), torch.cat([r for _, r in parts])
    if p == 1:
        return min(product, float((centre.abs() + radius).sum(0).max()))
    return min(product, spectral(centre) + spectral(radius), spectral(centre.abs() + radius))


def slope_product(chain: StepChain, bounds: list[Interval], p: float) -> float:
    """Return the product of the steps' p-norms, each linear map joined with the slopes that follow it."""
    total, after = 1.0, None  # after: the steepest slopes between this step and the next linear map
    for step, box in zip(reversed(chain.steps), reversed(bounds[:-1]), strict=True):
        if isinstance(step, Pointwise):
            low, high = step.curve.slopes(*box)
            steep = torch.maximum(low.abs(), high.abs()).amax(0)
            after = steep if after is None else after * steep
        elif isinstance(step, Affine):
            total, after = total * operator_norm(step, p, after).value, None
        else:
            total *= operator_norm(step, p).value * (1.0 if after is None else float(after.max()))
            after = None
    return total if after is None else total * float(after.max())


Line = tuple[Tensor, Tensor]  # slope and intercept


def pull_plane(step: Step, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return coefficients (M, *in_shape) and constants (M,) with rows·step(z) <= coefficients·z + constants."""
    if isinstance(step, Pointwise):
        (low_slope, low_at), (high_slope, high_at) = lines(step.curve, lower, upper)
        slope = torch.where(rows > 0, high_slope, low_slope)
        return rows * slope, (rows * torch.where(rows > 0, high_at, low_at)).flatten(1).sum(1)
    if not isinstance(step, MaxPool):
        constant = rows.new_zeros(len(rows)) if is_reshape(step) else (rows * _affine(step).offset).flatten(1).sum(1)
        return _affine(step).transposed(rows), constant
    low, high = step.windows(lower), step.windows(upper)  # (., C, window, windows)
    pick = torch.zeros_like(low).scatter_(2, low.argmax(2, keepdim=True), 1.0)  # the max is at least this entry
    others = torch.where(pick > 0, -torch.inf, high).amax(2)
    flat = rows.reshape(len(rows), step.out_shape[0], -1)  # (M, C, windows)
    sure = (flat <= 0) | (low.amax(2) > others)  # the picked entry always wins
    constant = torch.where(sure, 0.0, flat * high.amax(2)).flatten(1).sum(1)
    return step.gather(torch.where(sure, flat, 0.0)[:, :, None] * pick), constant


def lines(curve: Curve, lower: Tensor, upper: Tensor) -> tuple[Line, Line]:
    """Return a line below and a line above the curve between ``lower`` and ``upper``.

    With the least slope m on the interval f(x) - m x rises, so that the line of slope m through the upper end
    lies above and through the lower end below. Convex parts take their chord above and a tangent below.
    """
    f_low, f_high = curve.function(lower), curve.function(upper)
    m, _ = curve.slopes(lower, upper)
    below, above = (m, f_low - m * lower), (m, f_high - m * upper)
    if curve.shape == "general":
        return below, above
    chord = (f_high - f_low) / (upper - lower).clamp_min(1e-30)
    chord = torch.where(upper - lower > 1e-9, chord, m)
    # The two intercepts differ by rounding only; the safe side of each is taken.
    at_low, at_high = f_low - chord * lower, f_high - chord * upper
    touch = (lower + upper) / 2  # for a kink: the side with more room
    tangent = curve.slope_left(touch)
    at_touch = curve.function(touch) - tangent * touch
    convex = torch.ones_like(lower, dtype=torch.bool) if curve.shape == "convex" else upper <= 0
    concave = torch.zeros_like(convex) if curve.shape == "convex" else lower >= 0
    return (
        _choose(convex, (tangent, at_touch), _choose(concave, (chord, torch.minimum(at_low, at_high)), below)),
        _choose(convex, (chord, torch.maximum(at_low, at_high)), _choose(concave, (tangent, at_touch), above)),
    )


def _choose(where: Tensor, a: Line, b: Line) -> Line:
    return torch.where(where, a[0], b[0]), torch.where(where, a[1], b[1])


def plane(chain: StepChain, bounds: list[Interval], rows: Tensor, depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (M, d) and (M,): a plane above rows·z over the boxes, z what is computed in ``depth`` steps (all: r)."""
    steps = chain.steps[:depth]
    shape = steps[-1].out_shape if steps else chain.in_shape
    rows = rows.reshape(len(rows), *shape).to(torch.float64)
    constant = rows.new_zeros(len(rows))
    for at in reversed(range(len(steps))):
        wide = (rows.abs() * rounded(chain, at, bounds[at])).flatten(1).sum(1)
        rows, added = pull_plane(steps[at], rows, *bounds[at])
        constant = constant + added + wide
    return rows.flatten(1), constant


def tighten(chain: StepChain, region: Region) -> list[Interval]:
    """Return the bounds before every step and of r over one region: intervals made tighter by planes."""
    bounds: list[Interval] = [(region.lower, region.upper)]
    for depth, step in enumerate(chain.steps, start=1):
        low, high = push(chain, depth - 1, bounds[-1])
        needs = depth == len(chain.steps) or isinstance(chain.steps[depth], Pointwise | MaxPool)
        if needs and isinstance(step, Affine) and not is_reshape(step):
            above, below = _extremes(chain, region, bounds, depth)
            low, high = torch.maximum(low, below), torch.minimum(high, above)
        bounds.append((low, high))
    return bounds


def _extremes(chain: StepChain, region: Region, bounds: list[Interval], depth: int) -> tuple[Tensor, Tensor]:
    step = chain.steps[depth - 1]
    above, below = [], []
    for rows in unit_rows(step.out_size, 512):
        above.append(region.highest(*plane(chain, bounds, rows, depth)))
        below.append(-region.highest(*plane(chain, bounds, -rows, depth)))
    shape = (1, *step.out_shape)
    return torch.cat(above).reshape(shape), torch.cat(below).reshape(shape)
