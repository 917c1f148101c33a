"""Linear bounds: a plane above a scalar output of the chain, valid while the input stays in a box.

The output's coefficients are pulled back step by step; at an activation each is replaced by a line above or
below the curve on its interval, by the coefficient's sign (CROWN: Zhang et al. 2018). One backward pass for
any number of outputs, tighter than intervals because entries that move together cancel.
"""

from functools import singledispatch

import torch
from torch import Tensor

from gradveil.certificates.activations import Activation, Curve, Interval
from gradveil.certificates.chain import Chain
from gradveil.certificates.interval import push, unit_rows
from gradveil.certificates.region import Region
from gradveil.certificates.stages import Affine, MaxPool, Reshape, Stage
from gradveil.errors import CertificateError

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


def plane(chain: Chain, bounds: list[Interval], rows: Tensor, depth: int | None = None) -> tuple[Tensor, Tensor]:
    """Return (M, d) and (M,): a plane above rows·z, z the values after ``depth`` steps (all: r), over the boxes."""
    stages = chain.stages[:depth]
    shape = stages[-1].out_shape if stages else chain.in_shape
    rows = rows.reshape(len(rows), *shape).to(torch.float64)
    constant = rows.new_zeros(len(rows))
    for stage, (lower, upper) in zip(reversed(stages), reversed(bounds[: len(stages)]), strict=True):
        rows, added = pull_plane(stage, rows, lower, upper)
        constant = constant + added
    return rows.flatten(1), constant


def tighten(chain: Chain, region: Region, chunk: int = 512) -> list[Interval]:
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


def _extremes(chain: Chain, region: Region, bounds: list[Interval], depth: int, chunk: int) -> tuple[Tensor, Tensor]:
    stage = chain.stages[depth - 1]
    above, below = [], []
    for rows in unit_rows(stage.out_size, chunk):
        above.append(region.highest(*plane(chain, bounds, rows, depth)))
        below.append(-region.highest(*plane(chain, bounds, -rows, depth)))
    shape = (1, *stage.out_shape)
    return torch.cat(above).reshape(shape), torch.cat(below).reshape(shape)
