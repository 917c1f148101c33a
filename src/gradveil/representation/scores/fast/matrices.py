"""Exact row norms by dense matrix products, for devices that multiply fast: of one model, and of many stacked ones.

A 5x5 convolution of a 16x16 image is a matrix with few entries that are not zero. Multiplying by it takes some ten
times the multiplications, and a tensor core still does that sooner. For one model, columns are taken in bands of image
rows, and for each band only the rows of the matrix that reach it: that halves the work again. For many models, two
neighbouring convolutions reach only a small patch, so their product is one small matrix for each position, rows (out
channels, patch of the layer between) times one matrix that all positions share; only such pairs are multiplied densely.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from gradveil.modules import find_layer
from gradveil.representation.layers.jacobian import Tape
from gradveil.representation.layers.recorder import walkable
from gradveil.representation.layers.rules.activations import BY_OUTPUT
from gradveil.representation.layers.rules.arithmetic import Scale
from gradveil.representation.layers.rules.base import Operator, wide
from gradveil.representation.layers.rules.products import Dense
from gradveil.representation.layers.rules.shapes import Reshape
from gradveil.representation.layers.rules.windows import Convolution
from gradveil.representation.scores.exact import RowNorms, Start, add_norms, reduce_norms
from gradveil.tree import Params

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
    steps = [_as_step(operator) for operator in path]
    n, first = tape.r.shape[0], steps[0].matrix
    step = tape.at_once(memory)
    parts = [_row_norms(rows, steps[1:], n, ps) for rows in first.split(step)]
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


def _as_step(operator: Operator) -> _Step:
    if isinstance(operator, Convolution):
        return _Step(operator, matrix_of(operator), _bands(operator))
    if isinstance(operator, Dense):
        whole = slice(0, operator.weight.shape[0]), slice(0, operator.weight.shape[1])
        return _Step(operator, operator.weight, (whole,))
    return _Step(operator, torch.empty(0))


def _row_norms(rows: Tensor, steps: list[_Step], n: int, ps: Sequence[float]) -> list[Tensor]:
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
    place = _matrix_places(
        conv.source[1:], conv.target[1:], kernel, conv.stride, conv.padding, conv.dilation, str(conv.weight.device)
    )
    values = wide(conv.weight).permute(0, 2, 3, 1).expand(prod(conv.target[2:]), -1, -1, -1, -1).reshape(-1)
    flat = torch.zeros(prod(conv.target[1:]) * prod(conv.source[1:]) + 1, dtype=values.dtype, device=values.device)
    return flat.index_copy_(0, place, values)[:-1].view(prod(conv.target[1:]), prod(conv.source[1:]))


@cache  # by geometry; kept, since recordings of a device read it
def _matrix_places(
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


_HEADROOM = 16.0  # keeps products of scaled half-precision factors far from overflow


@dataclass(frozen=True)
class StackedRows:
    """r and its row norms for K models, each on its own batch; never waits for a device."""

    model: nn.Module  # the architecture; its weights are not used
    layer: str
    at_once: int = 2**10  # examples whose Jacobians lie in memory together

    @classmethod
    def of(cls, model: nn.Module, layer: str | None, x: Tensor) -> "StackedRows | None":
        """Return the scorer for a layer, where all before it is a chain of convolutions and activations; else None."""
        path = find_layer(model, layer)
        parts = walkable(model, path, x) or []
        known = bool(parts) and isinstance(parts[0], nn.Conv2d) and all(map(_is_known, parts))
        return cls(model, path) if known else None

    @torch.no_grad()
    def __call__(self, weights: Params, x: Tensor) -> RowNorms:
        step = max(self.at_once // x.shape[1], 1)
        parts = [
            self._some({name: value[at : at + step] for name, value in weights.items()}, x[at : at + step])
            for at in range(0, len(x), step)
        ]
        return RowNorms(torch.cat([p.r for p in parts]), {2.0: torch.cat([p.norms[2.0] for p in parts])})

    @torch.no_grad()
    def moment(self, weights: Params, x: Tensor) -> RowNorms:
        """Return the same with the norms of ``moment``: one pass of ones through the squared weights and slopes."""
        convs, r = self._forward(weights, x)
        spread = torch.ones_like(x[:, :1])
        for conv in convs:
            spread = _run(spread, conv.weight.square(), None, conv.stride, conv.padding) * conv.slopes.square()
        return RowNorms(r.flatten(2), {2.0: spread.flatten(2).sqrt()})

    def _some(self, weights: Params, x: Tensor) -> RowNorms:
        convs, r = self._forward(weights, x)
        half = x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium"
        product: Tensor | None = None
        scale = torch.ones(len(x), 1, 1, dtype=x.dtype, device=x.device)
        backwards = convs[::-1]  # from the output to the input
        for pair in (backwards[at : at + 2] for at in range(0, len(convs), 2)):
            factor, by = _factor(pair, half)  # (K, B or 1, out, in)
            scale = scale * by
            if product is not None:
                product = _times(product * _columns(pair[0].slopes).to(product.dtype), factor)
            else:
                product = factor
        assert product is not None
        norms = torch.linalg.vector_norm(product, dim=-1, dtype=x.dtype) * scale  # (K, B or 1, out)
        return RowNorms(r.flatten(2), {2.0: _natural(norms, convs[-1].out) * convs[-1].slopes.flatten(2)})

    def _forward(self, weights: Params, x: Tensor) -> "tuple[list[_Conv], Tensor]":
        """Run the chain; keep of each convolution its weight, geometry, and the slopes after it."""
        names = {module: name for name, module in self.model.named_modules()}
        found: list[_Conv] = []
        value = x
        for part in walkable(self.model, self.layer, x[0]) or ():
            if isinstance(part, nn.Conv2d):
                before = tuple(value.shape[2:])
                weight = weights[f"{names[part]}.weight"]
                stride, padding = part.stride[0], int(part.padding[0])
                value = _run(value, weight, weights.get(f"{names[part]}.bias"), stride, padding)
                geometry = stride, padding, before, tuple(value.shape[2:])
                found.append(_Conv(weight, *geometry, slopes=torch.ones_like(value)))
            elif type(part) in BY_OUTPUT:
                function, slopes = BY_OUTPUT[type(part)]
                value = function(value)
                found[-1].slopes = found[-1].slopes * slopes(value)
        return found, value


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """Return the convolutions (K, B, ...) of stacked inputs with stacked weights."""

    def run(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias[0] if bias else None, stride, padding)

    found: Tensor = vmap(run)(x, weight, *(() if bias is None else (bias,)))
    return found


def _is_known(part: nn.Module) -> bool:
    if isinstance(part, nn.Conv2d):
        square = all(len(set(pair)) == 1 for pair in (part.kernel_size, part.stride, part.padding))
        return square and part.groups == 1 and part.dilation == (1, 1)
    return type(part) in BY_OUTPUT or isinstance(part, nn.Flatten | nn.Identity)


@dataclass
class _Conv:
    weight: Tensor  # (K, out, in, k, k)
    stride: int
    padding: int
    source: tuple[int, ...]  # (C, H, W)
    out: tuple[int, ...]
    slopes: Tensor  # (K, B, *out), of what follows


def _factor(pair: Sequence[_Conv], half: bool) -> tuple[Tensor, Tensor]:
    """Return one or two convolutions as a matrix (K, B or 1, out, in), channels last, and what to multiply it by."""
    outer, inner = pair[0], pair[-1]
    weight, scale = _scaled(outer.weight, half)
    k = weight.shape[-1]
    if len(pair) == 1:
        last = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (K, out, k k in)
        local = F.pad(last, (0, 1))[:, None, None].expand(-1, 1, outer.out[1] * outer.out[2], -1, -1)
        return _spread(local, _places(outer.out, outer.source, k, outer.stride, outer.padding)), scale
    shared, more = _scaled(_patch_matrix(inner, k), half)  # (K, mid patch, in patch)
    slopes = inner.slopes
    padded = F.pad(slopes.to(weight.dtype), [outer.padding] * 4)  # (K, B, mid, H, W)
    windows = padded.unfold(3, k, outer.stride).unfold(4, k, outer.stride)  # (K, B, mid, oh, ow, k, k)
    patches = windows.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(2, 3)  # (K, B, P, mid patch)
    rows = weight.flatten(2)[:, None, None] * patches[:, :, :, None]  # (K, B, P, out, mid patch)
    local = torch.bmm(rows.flatten(1, 3), shared).view(*rows.shape[:4], -1)
    size = (k - 1) * inner.stride + inner.weight.shape[-1]
    stride, padding = outer.stride * inner.stride, outer.padding * inner.stride + inner.padding
    return _spread(local, _places(outer.out, inner.source, size, stride, padding)), scale * more


def _scaled(values: Tensor, half: bool) -> tuple[Tensor, Tensor]:
    """Return values (K, ...) fit for half precision, and the factor (K, 1, 1) that was taken out; else as they are."""
    if not half:
        return values, values.new_ones(len(values), 1, 1)
    largest = values.flatten(1).abs().amax(1).clamp_min(1e-30) * _HEADROOM  # (K,)
    return (values / largest.view(-1, *[1] * (values.ndim - 1))).half(), largest.view(-1, 1, 1)


def _patch_matrix(inner: _Conv, k: int) -> Tensor:
    """Return how a k x k patch of a convolution's output depends on its input: (K, channels k k, size² in channels).

    At least one more column follows, of zeros; their number is a multiple of eight, as tensor cores want it.
    """
    kernel = inner.weight.shape[-1]
    size = (k - 1) * inner.stride + kernel
    c_out, c_in = inner.weight.shape[1:3]
    columns = _width(c_in * size * size)
    where = _patch_places(c_out, c_in, k, kernel, inner.stride, columns, str(inner.weight.device))
    values = inner.weight[:, :, None, None].expand(-1, -1, k, k, -1, -1, -1).reshape(len(inner.weight), -1)
    empty = values.new_zeros(len(values), c_out * k * k * columns)
    return empty.index_copy_(1, where, values).view(len(values), c_out * k * k, columns)


def _width(columns: int) -> int:
    return -(-(columns + 1) // 8) * 8


@cache
def _patch_places(c_out: int, c_in: int, k: int, kernel: int, stride: int, columns: int, device: str) -> Tensor:
    row = torch.arange(c_out * k * k).view(c_out, k, k, 1, 1, 1)
    along = torch.arange(k)[:, None] * stride + torch.arange(kernel)  # (k, kernel)
    y, x = along.view(1, k, 1, 1, kernel, 1), along.view(1, 1, k, 1, 1, kernel)
    size = (k - 1) * stride + kernel
    column = (y * size + x) * c_in + torch.arange(c_in).view(1, 1, 1, c_in, 1, 1)
    return (row * columns + column).flatten().to(device)


def _places(
    out: tuple[int, ...], source: tuple[int, ...], size: int, stride: int, padding: int
) -> tuple[tuple[int, ...], ...]:
    return out, source, (size, stride, padding)


def _spread(local: Tensor, geometry: tuple[tuple[int, ...], ...]) -> Tensor:
    """Return rows of patches (K, B, P, out, size² in, ...) as rows over the whole input (K, B, P out, H W in)."""
    where = _spread_places(geometry, str(local.device))  # (P, H W in); outside the patch: the column of zeros
    index = where[None, None, :, None].expand(*local.shape[:2], -1, local.shape[3], -1)
    return local.gather(4, index).flatten(2, 3)


@cache
def _spread_places(geometry: tuple[tuple[int, ...], ...], device: str) -> Tensor:
    (_, oh, ow), (c, h, w), (size, stride, padding) = geometry
    y = torch.arange(h) - (torch.arange(oh)[:, None] * stride - padding)  # (oh, h), within the patch
    x = torch.arange(w) - (torch.arange(ow)[:, None] * stride - padding)  # (ow, w)
    y, x = y.view(oh, 1, h, 1, 1), x.view(1, ow, 1, w, 1)
    inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
    flat = (y * size + x) * c + torch.arange(c)
    return torch.where(inside, flat, c * size * size).view(oh * ow, h * w * c).to(device)


def _columns(slopes: Tensor) -> Tensor:
    """Return slopes (K, B, C, H, W) as factors of columns (K, B, 1, H W C)."""
    return slopes.permute(0, 1, 3, 4, 2).flatten(2)[:, :, None]


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of matrices (K, B, m, n) and (K, B or 1, n, l)."""
    shared = right.shape[1] == 1
    a, b = (left.flatten(1, 2), right[:, 0]) if shared else (left.flatten(0, 1), right.flatten(0, 1))
    return torch.bmm(a, b).view(*left.shape[:3], -1)


def _natural(norms: Tensor, out: tuple[int, ...]) -> Tensor:
    """Return (K, B, H W C) in the order C H W."""
    c, h, w = out
    return norms.view(*norms.shape[:2], h, w, c).permute(0, 1, 4, 2, 3).flatten(2)
