"""Exact row norms of chains of convolutions as products of small matrices: of many models, and of one on CUDA.

Two neighbouring convolutions reach only a small patch, so their product is one small matrix for each position: rows
(out channels, patch of the layer between) times one matrix of all positions. Only such pairs are multiplied densely.
That takes more multiplications than the convolutions, and a device that multiplies fast still does it sooner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from gradveil.modules import find_layer
from gradveil.representation.jacobian import Tape
from gradveil.representation.recorder import walkable
from gradveil.representation.rows import RowNorms
from gradveil.representation.rules.activations import BY_OUTPUT
from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import Shape, wide
from gradveil.representation.rules.shapes import Reshape
from gradveil.representation.rules.windows import Convolution
from gradveil.tree import Params

_LARGEST = 2**24  # entries of a pair's matrix that is worth writing out
_HEADROOM = 16.0  # keeps products of scaled half-precision factors far from overflow


def paired_rows(tape: Tape, ps: Sequence[float], memory: int) -> RowNorms | None:
    """Return r and the norms of all rows of one model; None where the tape is no chain of small convolutions."""
    convs = _convs_of(tape) if set(ps) == {2.0} else None
    if not convs:
        return None
    largest = max(prod(convs[max(at - 1, 0)].source) * prod(convs[at].out) for at in range(len(convs)))
    if largest > _LARGEST:
        return None
    step = max(1, memory // (3 * largest * tape.x.element_size()))
    parts = [_norms([c.some(slice(at, at + step)) for c in convs]) for at in range(0, len(tape.r), step)]
    norms = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return RowNorms(tape.r.flatten(1), {2.0: norms[0].expand(len(tape.r), -1)})


def _convs_of(tape: Tape) -> "list[_Conv] | None":
    """Return the convolutions of a tape, each with the slopes after it, where it holds nothing else."""
    convs: list[_Conv] = []
    slopes: Tensor | None = None
    for operator in tape.chain(len(tape.nodes) - 1) or []:  # from r back to the input
        if isinstance(operator, Reshape) and (operator.source == operator.target or not convs):
            if slopes is not None or operator.source[0] != operator.target[0]:
                return None
        elif isinstance(operator, Scale) and operator.source == operator.target and len(operator.source) == 4:
            by = torch.as_tensor(operator.by, dtype=wide(tape.x).dtype, device=tape.x.device)
            by = by.expand(by.shape[0] if by.ndim == 4 else 1, *operator.target[1:])
            slopes = by if slopes is None else slopes * by
        elif isinstance(operator, Convolution) and _is_square(operator):
            found = operator.target[1:]
            after = operator.weight.new_ones(1, *found) if slopes is None else slopes
            geometry = operator.stride[0], operator.padding[0], operator.source[1:], found
            convs.append(_Conv(operator.weight[None], *geometry, slopes=after[None]))
            slopes = None
        else:
            return None
    return convs[::-1] if slopes is None else None


def _is_square(conv: Convolution) -> bool:
    pairs = (conv.weight.shape[2:], conv.stride, conv.padding)
    square = all(len(pair) == 2 and len(set(pair)) == 1 for pair in pairs)
    return square and conv.groups == 1 and set(conv.dilation) == {1}


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
        return RowNorms(r.flatten(2), {2.0: _norms(convs)})

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
    source: Shape  # (C, H, W)
    out: Shape
    slopes: Tensor  # (K, B or 1, *out), of what follows

    def some(self, examples: slice) -> "_Conv":
        return self if self.slopes.shape[1] == 1 else replace(self, slopes=self.slopes[:, examples])


def _norms(convs: Sequence[_Conv]) -> Tensor:
    """Return the row norms (K, B, L) of a chain of convolutions, first to last."""
    like = convs[0].slopes
    half = like.is_cuda and like.dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium"
    product: Tensor | None = None
    scale = like.new_ones(len(like), 1, 1)
    backwards = convs[::-1]  # from the output to the input
    for pair in (backwards[at : at + 2] for at in range(0, len(convs), 2)):
        factor, by = _factor(pair, half)  # (K, B or 1, out, in)
        scale = scale * by
        if product is not None:
            product = _times(product * _channels_last(pair[0].slopes)[:, :, None].to(product.dtype), factor)
        else:
            product = factor
    assert product is not None
    norms = torch.linalg.vector_norm(product, dim=-1, dtype=like.dtype) * scale  # (K, B or 1, H W C)
    c, h, w = convs[-1].out
    natural = norms.view(*norms.shape[:2], h, w, c).permute(0, 1, 4, 2, 3).flatten(2)
    found: Tensor = natural * convs[-1].slopes.flatten(2).abs()
    return found


def _factor(pair: Sequence[_Conv], half: bool) -> tuple[Tensor, Tensor]:
    """Return one or two convolutions as a matrix (K, B or 1, out, in), channels last, and what to multiply it by."""
    outer, inner = pair[0], pair[-1]
    weight, scale = _scaled(outer.weight, half)
    k = weight.shape[-1]
    if len(pair) == 1:
        last = weight.permute(0, 1, 3, 4, 2).flatten(2)  # (K, out, k k in)
        local = F.pad(last, (0, 1))[:, None, None].expand(-1, 1, outer.out[1] * outer.out[2], -1, -1)
        return _spread(local, outer.out, outer.source, (k, outer.stride, outer.padding)), scale
    shared, more = _scaled(_patch_matrix(inner, k), half)  # (K, mid patch, in patch)
    slopes = inner.slopes
    padded = F.pad(slopes.to(weight.dtype), [outer.padding] * 4)  # (K, B, mid, H, W)
    windows = padded.unfold(3, k, outer.stride).unfold(4, k, outer.stride)  # (K, B, mid, oh, ow, k, k)
    patches = windows.permute(0, 1, 3, 4, 2, 5, 6).flatten(4).flatten(2, 3)  # (K, B, P, mid patch)
    rows = weight.flatten(2)[:, None, None] * patches[:, :, :, None]  # (K, B, P, out, mid patch)
    local = torch.bmm(rows.flatten(1, 3), shared).view(*rows.shape[:4], -1)
    size = (k - 1) * inner.stride + inner.weight.shape[-1]
    stride, padding = outer.stride * inner.stride, outer.padding * inner.stride + inner.padding
    return _spread(local, outer.out, inner.source, (size, stride, padding)), scale * more


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
    columns = -(-(c_in * size * size + 1) // 8) * 8
    where = _patch_places(c_out, c_in, k, kernel, inner.stride, columns, str(inner.weight.device))
    values = inner.weight[:, :, None, None].expand(-1, -1, k, k, -1, -1, -1).reshape(len(inner.weight), -1)
    empty = values.new_zeros(len(values), c_out * k * k * columns)
    return empty.index_copy_(1, where, values).view(len(values), c_out * k * k, columns)


@cache
def _patch_places(c_out: int, c_in: int, k: int, kernel: int, stride: int, columns: int, device: str) -> Tensor:
    row = torch.arange(c_out * k * k).view(c_out, k, k, 1, 1, 1)
    along = torch.arange(k)[:, None] * stride + torch.arange(kernel)  # (k, kernel)
    y, x = along.view(1, k, 1, 1, kernel, 1), along.view(1, 1, k, 1, 1, kernel)
    size = (k - 1) * stride + kernel
    column = (y * size + x) * c_in + torch.arange(c_in).view(1, 1, 1, c_in, 1, 1)
    return (row * columns + column).flatten().to(device)


def _spread(local: Tensor, out: Shape, source: Shape, geometry: Shape) -> Tensor:
    """Return rows of patches (K, B, P, out, size² in, ...) as rows over the whole input (K, B, P out, H W in)."""
    where = _spread_places(out, source, geometry, str(local.device))  # (P, H W in); the column of zeros outside
    index = where[None, None, :, None].expand(*local.shape[:2], -1, local.shape[3], -1)
    return local.gather(4, index).flatten(2, 3)


@cache
def _spread_places(out: Shape, source: Shape, geometry: Shape, device: str) -> Tensor:
    (_, oh, ow), (c, h, w), (size, stride, padding) = out, source, geometry
    y = torch.arange(h) - (torch.arange(oh)[:, None] * stride - padding)  # (oh, h), within the patch
    x = torch.arange(w) - (torch.arange(ow)[:, None] * stride - padding)  # (ow, w)
    y, x = y.view(oh, 1, h, 1, 1), x.view(1, ow, 1, w, 1)
    inside = (y >= 0) & (y < size) & (x >= 0) & (x < size)
    flat = (y * size + x) * c + torch.arange(c)
    return torch.where(inside, flat, c * size * size).view(oh * ow, h * w * c).to(device)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of matrices (K, B, m, n) and (K, B or 1, n, l)."""
    if right.shape[1] == 1:
        return torch.bmm(left.flatten(1, 2), right[:, 0]).view(*left.shape[:3], -1)
    return left @ right


def _channels_last(t: Tensor) -> Tensor:
    return t.permute(0, 1, 3, 4, 2).flatten(2)
