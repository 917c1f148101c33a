"""Interval bounds: what a chain's values and its Jacobian can be while the input stays in a box.

Values by interval arithmetic step by step; slopes of every activation from its interval; the Jacobian as
[centre - radius, centre + radius], pulled back from the representation to the input with |A| for the radius.
"""

from collections.abc import Iterator
from functools import singledispatch
from math import inf

import torch
from torch import Tensor

from gradveil.certificates.activations import Activation, Interval
from gradveil.certificates.chain import Chain
from gradveil.certificates.norms import operator_norm, spectral
from gradveil.certificates.region import ROUNDING
from gradveil.certificates.stages import Affine, MaxPool, Reshape, Stage
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


def propagate(chain: Chain, lower: Tensor, upper: Tensor) -> list[Interval]:
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


def pull_rows(chain: Chain, bounds: list[Interval], rows: Tensor) -> Interval:
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


def box_lipschitz(chain: Chain, bounds: list[Interval], p: float) -> float:
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


def slope_product(chain: Chain, bounds: list[Interval], p: float) -> float:
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
