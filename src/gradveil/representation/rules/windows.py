"""Maps over windows of an image: convolutions, and pooling, by the largest entry or the average.

A convolution's transpose with a stride is written as a plain convolution of phases.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import (
    Call,
    Edges,
    Operator,
    Shape,
    Step,
    Walked,
    affine,
    plain,
    rule,
    wide,
)
from gradveil.representation.rules.shapes import Move

aten = torch.ops.aten


@dataclass(frozen=True)
class Taps:
    """One dimension of a transposed convolution with stride s, as a plain convolution.

    Input position u = s t + b gets Σ_m w[a + s m] g[t + c - m] with a = (b + padding) mod s, c = (b + padding) div s.
    So each of the s phases b is a plain convolution over t; all phases share one window of offsets.
    """

    which: tuple[tuple[int, ...], ...]  # (s, window): the kernel position of each tap; kernel size: none
    before: int  # zeros (or, negative, a cut) before g
    after: int
    length: int  # of t

    @classmethod
    def of(cls, size: int, out: int, kernel: int, stride: int, padding: int) -> "Taps":
        """Return the taps for an input of ``size`` and an output of ``out`` entries."""
        shifts = [divmod(b + padding, stride) for b in range(stride)]
        offsets = [[c - m for m in range(len(range(a, kernel, stride)))] for c, a in shifts]
        used = [o for some in offsets for o in some] or [0]
        low, high = min(used), max(used)
        length = -(-size // stride)
        which = tuple(
            tuple(a + stride * (c - o) if o in some else kernel for o in range(low, high + 1))
            for (c, a), some in zip(shifts, offsets, strict=True)
        )
        return cls(which, -low, length - 1 + high - (out - 1), length)


@dataclass(frozen=True)
class Convolution(Operator):
    """Convolution in one, two or three dimensions."""

    weight: Tensor  # (out, in / groups, *kernel)
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    source: Shape  # (N, in, *size)
    target: Shape  # (N, out, *size)

    def push(self, t: Tensor) -> Tensor:
        settings = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups)
        return self._stacked(torch.convolution(t.flatten(0, 1), self.weight, None, *settings), t)

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return replace(self, weight=f(self.weight))

    def pull(self, g: Tensor) -> Tensor:
        if not self._plain:
            return self._transposed(g)
        if set(self.stride) == {1}:
            return self._stacked(self._phases(g), g)
        parts = self._interleaved(g)  # (K, n, th, sh, tw, sw, c)
        th, sh, tw, sw, c = parts.shape[2:]
        if g.is_cuda:
            whole = parts.permute(0, 1, 6, 2, 3, 4, 5).reshape(*g.shape[:2], c, th * sh, tw * sw)
        else:
            whole = parts.reshape(*g.shape[:2], th * sh, tw * sw, c).permute(0, 1, 4, 2, 3)
        return whole[..., : self.source[2], : self.source[3]]

    def pull_scaled(self, g: Tensor, scale: Scale) -> Tensor:
        by = scale.last
        if by is None or set(self.stride) == {1} or not (self._plain and self._fits):
            return scale.pull(self.pull(g))
        parts = self._interleaved(g)
        k, n = g.shape[0], max(g.shape[1], by.shape[0])
        out = torch.empty(k, n, *parts.shape[2:], dtype=g.dtype, device=g.device)
        torch.mul(parts, by.view(-1, *parts.shape[2:]), out=out)
        return out.view(k, n, *self.source[2:], self.source[1]).permute(0, 1, 4, 2, 3)

    def _stacked(self, flat: Tensor, g: Tensor) -> Tensor:
        return flat.view(g.shape[0], g.shape[1], *flat.shape[1:])

    def _interleaved(self, g: Tensor) -> Tensor:
        (sh, sw), c = self.stride, self.source[1]
        phases = self._phases(g)  # (K n, sh sw c, th, tw)
        apart = phases.view(*g.shape[:2], sh, sw, c, *phases.shape[2:])
        return apart.permute(0, 1, 5, 2, 6, 3, 4)

    def pull_any(self, g: Tensor) -> Tensor:
        return self._stacked(self._phases(g), g) if self._plain and self._fits else self.pull(g)

    def rows(self, index: Tensor) -> Tensor | None:
        if not (self.groups == 1 and len(self.stride) == 2):
            return None
        (c, h, w), (_, oh, ow) = self.source[1:], self.target[1:]
        (ph, pw), (dh, dw), (kh, kw) = self.padding, self.dilation, self.weight.shape[2:]
        across = w + 2 * pw
        area = (h + 2 * ph) * across
        flat = index.flatten()
        corner = flat // ow % oh * (self.stride[0] * across) + flat % ow * self.stride[1]
        steps = (
            torch.arange(kh, device=flat.device)[:, None] * (dh * across) + torch.arange(kw, device=flat.device) * dw
        )
        place = torch.arange(len(flat), device=flat.device)[:, None] * area + corner[:, None] + steps.flatten()
        canvas = self.weight.new_zeros(len(flat) * area, c)
        canvas[place.flatten()] = self._last[flat // (oh * ow)].view(-1, c)
        whole = canvas.view(*index.shape, h + 2 * ph, across, c)
        rows = whole[:, :, ph : ph + h, pw : pw + w].permute(0, 1, 4, 2, 3)
        return rows.contiguous() if rows.is_cuda else rows

    @property
    def cost(self) -> int:
        return self.weight.numel() * prod(self.target[2:])

    @property
    def _fits(self) -> bool:
        return all(n % s == 0 for n, s in zip(self.source[2:], self.stride, strict=True))

    @property
    def _plain(self) -> bool:
        """Whether phases pay; in double precision a CPU has no fast convolution to take them to."""
        fast = self.weight.is_cuda or self.weight.dtype != torch.float64
        return fast and len(self.stride) == 2 and self.groups == 1 and set(self.dilation) == {1}

    @property
    def _order(self) -> torch.memory_format:
        """What convolutions are fastest in: channels last on CPUs, not on CUDA in full precision."""
        return torch.contiguous_format if self.weight.is_cuda else torch.channels_last

    @cached_property
    def _last(self) -> Tensor:
        return self.weight.flatten(2).transpose(1, 2).contiguous()  # (out, kernel, in)

    @cached_property
    def _taps(self) -> tuple[Taps, Taps]:
        geometry = (self.source[2:], self.target[2:], self.weight.shape[2:], self.stride, self.padding)
        rows, columns = (Taps.of(*numbers) for numbers in zip(*geometry, strict=True))
        return rows, columns

    @cached_property
    def _phase_weight(self) -> Tensor:
        rows, columns = (_on_device(taps.which, str(self.weight.device)) for taps in self._taps)
        padded = F.pad(self.weight, (0, 1, 0, 1))  # one place more, of zeros
        taken = padded[:, :, rows][..., columns]  # (out, in, sh, window, sw, window)
        weight = taken.permute(2, 4, 1, 0, 3, 5).flatten(0, 2)  # (sh sw in, out, window, window)
        return weight.contiguous(memory_format=self._order)

    def _phases(self, g: Tensor) -> Tensor:
        flat, (rows, columns) = g.flatten(0, 1).contiguous(memory_format=self._order), self._taps
        even = rows.before == rows.after >= 0 and columns.before == columns.after >= 0
        if even:
            return F.conv2d(flat, self._phase_weight, padding=(rows.before, columns.before))
        return F.conv2d(F.pad(flat, (columns.before, columns.after, rows.before, rows.after)), self._phase_weight)

    def _transposed(self, g: Tensor) -> Tensor:
        flat = g.flatten(0, 1)
        like = flat.new_empty(1).expand(flat.shape[0], *self.source[1:])
        settings = (self.stride, self.padding, self.dilation, False, [0], self.groups)
        by_input, *_ = aten.convolution_backward(flat, like, self.weight, None, *settings, [True, False, False])
        return self._stacked(by_input, g)


@cache  # by geometry; kept, since recordings of a device read it
def _on_device(which: tuple[tuple[int, ...], ...], device: str) -> Tensor:
    return torch.tensor(which, device=device)


@rule("convolution", step=affine)
def _convolution(call: Call) -> Edges | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if transposed or call.depends(weight) or call.depends(bias) or x.ndim != weight.ndim:
        return None
    stride, padding, dilation = (full(s, weight.ndim - 2) for s in (stride, padding, dilation))
    shapes = tuple(x.shape), tuple(call.out.shape)
    return [(x, Convolution(wide(weight.detach()), stride, padding, dilation, groups, *shapes))]


def full(setting: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return a setting for each dimension."""
    given = (setting,) if isinstance(setting, int) else tuple(setting)
    return given * ndim if len(given) == 1 else given


@plain(nn.Conv2d, when=lambda layer: layer.padding_mode == "zeros" and not isinstance(layer.padding, str))
def _walked_convolution(layer: nn.Conv2d, x: Tensor) -> Walked:
    assert not isinstance(layer.padding, str)
    weight, stride, padding, dilation = layer.weight.detach(), layer.stride, layer.padding, layer.dilation
    out = F.conv2d(x, weight, layer.bias, stride, padding, dilation, layer.groups)
    shapes = tuple(x.shape), tuple(out.shape)
    return out, Convolution(wide(weight), stride, padding, dilation, layer.groups, *shapes)


@dataclass(frozen=True)
class Choose(Move):
    """Max pooling: each output entry is one entry of its channel."""

    index: Tensor  # (N, C, ...out): flat positions within a channel
    source: Shape  # (N, C, ...in)
    window: tuple[int, ...] | None = None  # kernel, stride, padding, dilation, each for rows and columns, where known

    def push(self, t: Tensor) -> Tensor:
        t = t.expand(-1, *self.source).flatten(3)  # (K, N, C, in)
        chosen = self.index.flatten(2).expand(t.shape[0], -1, -1, -1)
        return t.gather(3, chosen).view(t.shape[0], *self.index.shape)

    def pull(self, g: Tensor) -> Tensor:
        k = g.shape[0]
        g = g.expand(-1, *self.index.shape).flatten(3)
        chosen = self.index.flatten(2).expand(k, -1, -1, -1)
        zeros = g.new_zeros(k, *self.source[:2], prod(self.source[2:]))
        return zeros.scatter_add_(3, chosen, g).view(k, *self.source)

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        size = prod(self.source[2:])
        channel = torch.arange(self.source[1], device=self.index.device).view(1, -1, *[1] * (self.index.ndim - 2))
        places = (self.index + channel * size).flatten(1)  # (N, out)
        return places.gather(1, index.expand(places.shape[0], -1)), factor


@dataclass(frozen=True)
class MaxPool(Step):
    """The largest of each window of a 2-d map."""

    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    ceil: bool

    def __call__(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil)

    def windows(self, x: Tensor) -> Tensor:
        """Return the entries of every window (N, C, size of a window, windows); outside the map is -inf."""
        n, c = x.shape[:2]
        bottom, right = self._reach()
        top, left = self.padding
        padded = F.pad(x.reshape(n * c, 1, *x.shape[2:]), (left, right, top, bottom), value=-torch.inf)
        entries = F.unfold(padded, self.kernel, self.dilation, 0, self.stride)
        return entries.reshape(n, c, *entries.shape[1:])

    def gather(self, windows: Tensor) -> Tensor:
        """Return the transpose of ``windows``: each pixel's sum over the windows that hold it (N, C, H, W)."""
        n, c = windows.shape[:2]
        bottom, right = self._reach()
        top, left = self.padding
        h, w = self.in_shape[1:]
        size = (h + top + bottom, w + left + right)
        summed = F.fold(windows.flatten(0, 1), size, self.kernel, self.dilation, 0, self.stride)
        return summed[:, 0, top : top + h, left : left + w].reshape(n, c, h, w)

    def _reach(self) -> tuple[int, int]:

        def beyond(i: int) -> int:
            last = (self.out_shape[i + 1] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1)
            return max(0, last + 1 - self.in_shape[i + 1] - self.padding[i])

        return beyond(0), beyond(1)

    def overlap(self) -> int:
        """Return in how many windows a pixel can lie: 1 where windows do not overlap."""
        ones = torch.ones(1, 1, prod(self.kernel), prod(self.out_shape[1:]))
        return int(self.gather(ones).max())


def _max_pool_step(call: Call, edges: Edges) -> Step:
    ((_, operator),) = edges
    assert isinstance(operator, Choose)
    assert operator.window is not None
    kernel, stride, padding, dilation = (operator.window[i : i + 2] for i in range(0, 8, 2))
    return MaxPool(*call.shapes, kernel, stride, padding, dilation, bool(call.arg(5, "ceil_mode", False)))


@rule("max_pool2d_with_indices", step=_max_pool_step)
def _max_pool(call: Call) -> Edges | None:
    kernel = call.arg(1, "kernel_size", None)
    stride = call.arg(2, "stride", None) or kernel
    settings = (kernel, stride, call.arg(3, "padding", 0), call.arg(4, "dilation", 1))
    window = tuple(n for s in settings for n in full(s, 2))
    return [(call.x, Choose(call.outs[1], tuple(call.x.shape), window))] if call.x.ndim == 4 else None


@plain(nn.MaxPool2d)
def _walked_max_pool(layer: nn.MaxPool2d, x: Tensor) -> Walked:
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    out, index = F.max_pool2d(x, *settings, layer.ceil_mode, return_indices=True)
    return out, Choose(index, tuple(x.shape), tuple(n for s in settings for n in full(s, 2)))


@rule("max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _other_max_pool(call: Call) -> Edges | None:
    batched = call.x.ndim == (4 if call.outs[1].ndim == 4 else 5)
    return [(call.x, Choose(call.outs[1], tuple(call.x.shape)))] if batched else None


@dataclass(frozen=True)
class Average(Operator):
    """Average pooling: a matrix on the rows of an image and one on its columns."""

    down: Tensor  # (out, in), of rows
    across: Tensor  # (out, in), of columns

    @classmethod
    def of(cls, call: Call) -> "Average":
        """Read both matrices off what the operation makes of rows, of columns and of a whole image of ones."""
        x = wide(call.x)
        h, w = x.shape[2:]
        rows, columns = (torch.eye(n, dtype=x.dtype, device=x.device)[:, None] for n in (h, w))
        images = x.new_ones(1, 1, h, w), rows[..., None].expand(-1, -1, -1, w), columns[:, None].expand(-1, -1, h, -1)
        ones, by_row, by_column = (call.function(image, *call.args[1:])[:, 0] for image in images)
        return cls(by_row[:, :, 0].t(), by_column[:, 0].t() / ones[0, 0, 0])

    def push(self, t: Tensor) -> Tensor:
        return self.down @ t @ self.across.t()

    def pull(self, g: Tensor) -> Tensor:
        return self.down.t() @ g @ self.across

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return Average(f(self.down), f(self.across))  # f of a product is the product of both


@rule("avg_pool2d", "_adaptive_avg_pool2d", step=affine)
def _average(call: Call) -> Edges | None:
    return None if call.kwargs or call.x.ndim != 4 else [(call.x, Average.of(call))]
