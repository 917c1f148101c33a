"""Exact row norms by matrix products: every convolution written out as a matrix, for devices that multiply fast.

A 5x5 convolution of a 16x16 image is a matrix with few entries that are not zero. Multiplying by it takes some ten
times the multiplications, and a tensor core still does that sooner. Columns are taken in bands of image rows, and for
each band only the rows of the matrix that reach it: that halves the work again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from gradveil.representation.layers.jacobian import Tape
from gradveil.representation.layers.rules.arithmetic import Scale
from gradveil.representation.layers.rules.base import Operator, wide
from gradveil.representation.layers.rules.convolution import Convolution
from gradveil.representation.layers.rules.dense import Dense
from gradveil.representation.layers.rules.shapes import Reshape
from gradveil.representation.scores.exact import RowNorms, Start, add_norms, reduce_norms

_LARGEST = 2**24  # entries of a matrix that is worth writing out
_BANDS = 4


def dense_rows(tape: Tape, ps: Sequence[float], memory: int) -> RowNorms | None:
    """Return r and the norms of all rows; None where the tape is no chain of small layers. Never waits for a device."""
    start = Start.of(tape)
    path = tape.chain(start.node)
    if not path or not isinstance(path[0], Convolution | Dense) or start.index.shape[0] != 1:
        return None
    if not all(map(_is_small, path)):
        return None
    steps = [_step(operator) for operator in path]
    n, first = tape.r.shape[0], steps[0].matrix
    step = tape.at_once(memory)
    parts = [_norms(rows, steps[1:], n, ps) for rows in first.split(step)]
    norms = {}
    for k, p in enumerate(ps):
        entries = torch.cat([part[k] for part in parts]).t()  # (n, entries of the start node, channels last)
        natural = _channels_first(entries, tape.nodes[start.node].shape)
        norms[p] = (natural[:, start.index[0]] * start.factor.abs()).expand(n, -1)
    return RowNorms(tape.r.flatten(1), norms)


def _is_small(operator: Operator) -> bool:
    if isinstance(operator, Convolution):
        plain = len(operator.stride) == 2 and operator.groups == 1
        return plain and prod(operator.source[1:]) * prod(operator.target[1:]) <= _LARGEST
    if isinstance(operator, Dense):
        return len(operator.batch_shape) == 1
    if isinstance(operator, Scale):
        return operator.source == operator.target
    return isinstance(operator, Reshape) and operator.source[0] == operator.target[0]


@dataclass(frozen=True)
class _Step:
    """One map, applied to rows (R, n, entries) with channels last."""

    operator: Operator
    matrix: Tensor  # (out, in), channels last on both sides; empty where the map is none
    bands: tuple[tuple[slice, slice], ...] = ()  # which rows of the matrix reach which columns


def _step(operator: Operator) -> _Step:
    if isinstance(operator, Convolution):
        return _Step(operator, matrix_of(operator), _bands(operator))
    if isinstance(operator, Dense):
        whole = slice(0, operator.weight.shape[0]), slice(0, operator.weight.shape[1])
        return _Step(operator, operator.weight, (whole,))
    return _Step(operator, torch.empty(0))


def _norms(rows: Tensor, steps: list[_Step], n: int, ps: Sequence[float]) -> list[Tensor]:
    """Return, for each p, the norms (R, n) of rows (R, entries) after all further steps."""
    g = rows[:, None]  # (R, 1 or n, entries)
    for place, step in enumerate(steps):
        if step.bands and place == len(steps) - 1:
            return _together([g[..., into] @ step.matrix[into, columns] for into, columns in step.bands], ps)
        if step.bands:
            flat = g.flatten(0, 1)
            out = flat.new_empty(len(flat), step.matrix.shape[1])
            for into, columns in step.bands:
                torch.mm(flat[:, into], step.matrix[into, columns], out=out[:, columns])
            g = out.view(*g.shape[:2], -1)
        elif isinstance(step.operator, Scale):
            g = g * _channels_last(step.operator.by, step.operator.source)
        else:
            g = _reordered(g, step.operator)
    return reduce_norms(g, ps)


def _together(parts: list[Tensor], ps: Sequence[float]) -> list[Tensor]:
    found = reduce_norms(parts[0], ps)
    for part in parts[1:]:
        found = [add_norms(a, b, p) for a, b, p in zip(found, reduce_norms(part, ps), ps, strict=True)]
    return found


def _channels_last(by: Tensor | float, shape: tuple[int, ...]) -> Tensor | float:
    if not isinstance(by, Tensor):
        return by
    whole = by.expand(by.shape[0] if by.ndim == len(shape) else 1, *shape[1:])
    return whole.permute(0, 2, 3, 1).flatten(1) if len(shape) == 4 else whole.flatten(1)


def _channels_first(entries: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return (n, entries) in the node's own order."""
    if len(shape) != 4:
        return entries
    c, h, w = shape[1:]
    return entries.view(-1, h, w, c).permute(0, 3, 1, 2).flatten(1)


def _reordered(g: Tensor, operator: Operator) -> Tensor:
    assert isinstance(operator, Reshape)
    for shape, inwards in ((operator.target, False), (operator.source, True)):
        if len(shape) == 4 and shape[1] > 1:
            c, h, w = shape[1:]
            apart = g.view(*g.shape[:2], c, h, w) if inwards else g.view(*g.shape[:2], h, w, c)
            g = apart.permute((0, 1, 3, 4, 2) if inwards else (0, 1, 4, 2, 3)).flatten(2)
    return g


def matrix_of(conv: Convolution) -> Tensor:
    """Return a convolution as a matrix (out, in), both sides with channels last."""
    kernel = tuple(conv.weight.shape[2:])
    place = _places(
        conv.source[1:], conv.target[1:], kernel, conv.stride, conv.padding, conv.dilation, str(conv.weight.device)
    )
    values = wide(conv.weight).permute(0, 2, 3, 1).expand(prod(conv.target[2:]), -1, -1, -1, -1).reshape(-1)
    flat = torch.zeros(prod(conv.target[1:]) * prod(conv.source[1:]) + 1, dtype=values.dtype, device=values.device)
    return flat.index_copy_(0, place, values)[:-1].view(prod(conv.target[1:]), prod(conv.source[1:]))


@cache  # by geometry; kept, since recordings of a device read it
def _places(
    source: tuple[int, ...], target: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], device: str,
) -> Tensor:  # fmt: skip
    """Return where each weight goes in the flat matrix, for (oh, ow, out, kh, kw, in); past its end: nowhere."""
    (c, h, w), (co, oh, ow), (kh, kw) = source, target, kernel
    y = torch.arange(oh)[:, None] * stride[0] - padding[0] + torch.arange(kh) * dilation[0]  # (oh, kh)
    x = torch.arange(ow)[:, None] * stride[1] - padding[1] + torch.arange(kw) * dilation[1]  # (ow, kw)
    y, x = y.view(oh, 1, 1, kh, 1, 1), x.view(1, ow, 1, 1, kw, 1)
    row = torch.arange(oh * ow * co).view(oh, ow, co, 1, 1, 1)
    place = row * (h * w * c) + (y * w + x) * c + torch.arange(c)
    inside = (y >= 0) & (y < h) & (x >= 0) & (x < w)
    return torch.where(inside, place, oh * ow * co * h * w * c).flatten().to(device)


def _bands(conv: Convolution) -> tuple[tuple[slice, slice], ...]:
    (c, h, w), (co, oh, ow) = conv.source[1:], conv.target[1:]
    stride, padding, reach = conv.stride[0], conv.padding[0], conv.dilation[0] * (conv.weight.shape[2] - 1)
    count = min(_BANDS, h)
    edges = [h * k // count for k in range(count + 1)]
    found = []
    for top, bottom in pairwise(edges):
        low = max(0, -(-(top + padding - reach) // stride))
        high = min(oh, (bottom - 1 + padding) // stride + 1)
        found.append((slice(low * ow * co, max(low, high) * ow * co), slice(top * w * c, bottom * w * c)))
    return tuple(found)
