"""Interval bounds: what a chain's values and its Jacobian can be while the input stays in a box.

Values by interval arithmetic step by step; slopes of every activation from its interval; the Jacobian as
[centre - radius, centre + radius], pulled back from the representation to the input with |A| for the radius.
"""

from collections.abc import Iterator
from functools import singledispatch
from math import inf

import torch
from torch import Tensor

from gradveil.certificates.base import ROUNDING, Region
from gradveil.certificates.bounds.chain import StepChain
from gradveil.certificates.bounds.norms import operator_norm, spectral
from gradveil.certificates.bounds.stages import Activation, Affine, Curve, Interval, MaxPool, Reshape, Stage
from gradveil.errors import CertificateError


@singledispatch
def push(stage: Stage, lower: Tensor, upper: Tensor) -> Interval:
    """Return bounds of the step's output (N, *out_shape) while its input lies between the given ones."""
    raise CertificateError(f"No interval bound is known for {type(stage).__name__}.")


@push.register
def _(stage: Affine, lower: Tensor, upper: Tensor) -> Interval:
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    centre = stage(middle)
    radius = stage.linear(half + ROUNDING * middle.abs(), absolute=True) + ROUNDING * stage.offset.abs()
    return centre - radius, centre + radius


@push.register
def _(stage: Activation, lower: Tensor, upper: Tensor) -> Interval:
    low, high = stage.curve.values(lower, upper)
    return low - ROUNDING * low.abs(), high + ROUNDING * high.abs()


@push.register(MaxPool)
@push.register(Reshape)
def _(stage: MaxPool | Reshape, lower: Tensor, upper: Tensor) -> Interval:
    return stage(lower), stage(upper)  # monotone in every entry


def propagate(chain: StepChain, lower: Tensor, upper: Tensor) -> list[Interval]:
    """Return the bounds before every step, and last those of r itself."""
    bounds = [(lower.to(torch.float64), upper.to(torch.float64))]
    for stage in chain.stages:
        bounds.append(push(stage, *bounds[-1]))
    return bounds


@singledispatch
def pull(stage: Stage, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    """Return centre and radius of rowᵀ J for rows (M, *out_shape) given as centre and radius.

    ``lower`` and ``upper`` bound the step's input: one box for all rows (1, *in_shape) or one each.
    """
    raise CertificateError(f"No slope bound is known for {type(stage).__name__}.")


@pull.register
def _(stage: Affine, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    return stage.transposed(centre), stage.transposed(radius, absolute=True)


@pull.register
def _(stage: Reshape, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    return centre.reshape(-1, *stage.in_shape), radius.reshape(-1, *stage.in_shape)


@pull.register
def _(stage: Activation, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    return _times(centre, radius, *stage.curve.slopes(lower, upper))


@pull.register
def _(stage: MaxPool, centre: Tensor, radius: Tensor, lower: Tensor, upper: Tensor) -> Interval:
    low, high = stage.windows(lower), stage.windows(upper)  # (., C, window, windows)
    best, second = low.max(dim=2, keepdim=True).values, high.topk(min(2, high.shape[2]), dim=2).values
    rival = torch.where(high == second[:, :, :1], second[:, :, -1:], second[:, :, :1])  # best of the others
    alone = high.shape[2] == 1
    can_win = (high >= best).to(low.dtype)
    must_win = torch.ones_like(low) if alone else (low > rival).to(low.dtype)
    flat = (len(centre), stage.out_shape[0], 1, -1)
    c, r = _times(centre.reshape(flat), radius.reshape(flat), must_win, can_win)
    return stage.gather(c), stage.gather(r)


def _times(centre: Tensor, radius: Tensor, low: Tensor, high: Tensor) -> Interval:
    """Return centre and radius of [centre ± radius] x [low, high]."""
    middle, half = (low + high) / 2, (high - low) / 2
    return centre * middle, centre.abs() * half + radius * (middle.abs() + half)


def pull_rows(chain: StepChain, bounds: list[Interval], rows: Tensor) -> Interval:
    """Return centre and radius of rowᵀ J (M, d) over the boxes, for rows (M, L)."""
    shape = chain.stages[-1].out_shape if chain.stages else chain.in_shape
    centre = rows.reshape(len(rows), *shape).to(torch.float64)
    radius = torch.zeros_like(centre)
    for stage, (lower, upper) in zip(reversed(chain.stages), reversed(bounds[:-1]), strict=True):
        centre, radius = pull(stage, centre, radius, lower, upper)
    return centre.flatten(1), radius.flatten(1)


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
    total, i = 1.0, 0
    while i < len(chain.stages):
        stage, after = chain.stages[i], None
        if isinstance(stage, Activation):
            total *= float(_steepest(stage, bounds[i]).max())
            i += 1
            continue
        i += 1
        while isinstance(stage, Affine) and i < len(chain.stages) and isinstance(chain.stages[i], Activation):
            steep = _steepest(chain.stages[i], bounds[i])
            after = steep if after is None else after * steep
            i += 1
        total *= operator_norm(stage, p, after).value
    return total


def _steepest(stage: Stage, bounds: Interval) -> Tensor:
    assert isinstance(stage, Activation)
    low, high = stage.curve.slopes(*bounds)
    return torch.maximum(low.abs(), high.abs()).amax(0)


Line = tuple[Tensor, Tensor]  # slope and intercept


@singledispatch
def pull_plane(stage: Stage, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Return coefficients (M, *in_shape) and constants (M,) with rows·stage(z) <= coefficients·z + constants."""
    raise CertificateError(f"No linear bound is known for {type(stage).__name__}.")


@pull_plane.register
def _(stage: Affine, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    return stage.transposed(rows), (rows * stage.offset).flatten(1).sum(1)


@pull_plane.register
def _(stage: Reshape, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    return rows.reshape(-1, *stage.in_shape), rows.new_zeros(len(rows))


@pull_plane.register
def _(stage: Activation, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    (low_slope, low_at), (high_slope, high_at) = lines(stage.curve, lower, upper)
    slope = torch.where(rows > 0, high_slope, low_slope)
    return rows * slope, (rows * torch.where(rows > 0, high_at, low_at)).flatten(1).sum(1)


@pull_plane.register
def _(stage: MaxPool, rows: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    low, high = stage.windows(lower), stage.windows(upper)  # (., C, window, windows)
    pick = torch.zeros_like(low).scatter_(2, low.argmax(2, keepdim=True), 1.0)  # the max is at least this entry
    others = torch.where(pick > 0, -torch.inf, high).amax(2)
    sure = low.amax(2) > others  # the picked entry always wins
    top = high.amax(2)
    flat = rows.reshape(len(rows), stage.out_shape[0], -1)  # (M, C, windows)
    through = torch.where((flat <= 0) | sure, flat, 0.0)
    constant = torch.where((flat <= 0) | sure, torch.zeros_like(flat), flat * top).flatten(1).sum(1)
    return stage.gather(through[:, :, None] * pick), constant


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
    """Return (M, d) and (M,): a plane above rows·z, z the values after ``depth`` steps (all: r), over the boxes."""
    stages = chain.stages[:depth]
    shape = stages[-1].out_shape if stages else chain.in_shape
    rows = rows.reshape(len(rows), *shape).to(torch.float64)
    constant = rows.new_zeros(len(rows))
    for stage, (lower, upper) in zip(reversed(stages), reversed(bounds[: len(stages)]), strict=True):
        rows, added = pull_plane(stage, rows, lower, upper)
        constant = constant + added
    return rows.flatten(1), constant


def tighten(chain: StepChain, region: Region, chunk: int = 512) -> list[Interval]:
    """Return the bounds before every step and of r over one region: intervals made tighter by planes."""
    bounds: list[Interval] = [(region.lower, region.upper)]
    for depth, stage in enumerate(chain.stages, start=1):
        low, high = push(stage, *bounds[-1])
        needs = depth == len(chain.stages) or isinstance(chain.stages[depth], Activation | MaxPool)
        if needs and isinstance(stage, Affine):
            above, below = _extremes(chain, region, bounds, depth, chunk)
            low, high = torch.maximum(low, below), torch.minimum(high, above)
        bounds.append((low, high))
    return bounds


def _extremes(
    chain: StepChain, region: Region, bounds: list[Interval], depth: int, chunk: int
) -> tuple[Tensor, Tensor]:
    stage = chain.stages[depth - 1]
    above, below = [], []
    for rows in unit_rows(stage.out_size, chunk):
        above.append(region.highest(*plane(chain, bounds, rows, depth)))
        below.append(-region.highest(*plane(chain, bounds, -rows, depth)))
    shape = (1, *stage.out_shape)
    return torch.cat(above).reshape(shape), torch.cat(below).reshape(shape)
