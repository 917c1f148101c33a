"""Pooling: the largest of a window, which is a choice of entries at a point, and averages, which are linear."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.layers.rules.base import (
    Affine,
    Call,
    Edges,
    Operator,
    Shape,
    Step,
    Walked,
    affine,
    plain,
    rule,
)
from gradveil.representation.layers.rules.convolution import Convolution, full
from gradveil.representation.layers.rules.shapes import Move

aten = torch.ops.aten


@dataclass(frozen=True)
class Choose(Move):
    """Max pooling: each output entry is one entry of its channel."""

    index: Tensor  # (N, C, ...out): flat positions within a channel
    source: Shape  # (N, C, ...in)
    window: tuple[int, ...] | None = None  # kernel, stride, padding, dilation, each for rows and columns, where known

    def push(self, t: Tensor) -> Tensor:
        """Return the chosen entries."""
        t = t.expand(-1, *self.source).flatten(3)  # (K, N, C, in)
        chosen = self.index.flatten(2).expand(t.shape[0], -1, -1, -1)
        return t.gather(3, chosen).view(t.shape[0], *self.index.shape)

    def pull(self, g: Tensor) -> Tensor:
        """Return zeros, with what came in added at the chosen places."""
        k = g.shape[0]
        g = g.expand(-1, *self.index.shape).flatten(3)
        chosen = self.index.flatten(2).expand(k, -1, -1, -1)
        zeros = g.new_zeros(k, *self.source[:2], prod(self.source[2:]))
        return zeros.scatter_add_(3, chosen, g).view(k, *self.source)

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the places that were chosen."""
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
        """Return the pooled maps."""
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
        """How far beyond the map's bottom and right the last window reaches."""

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
    """Average pooling over windows; ``settings`` are those of the operation after its input."""

    settings: tuple[Any, ...]
    source: Shape
    scale: Tensor | None = None  # of each output, (C, *out)

    def push(self, t: Tensor) -> Tensor:
        """Return the averages."""
        averages: Tensor = self._pool(t.flatten(0, 1)).unflatten(0, t.shape[:2])
        return self._scaled(averages)

    def pull(self, g: Tensor) -> Tensor:
        """Return each window's share."""
        flat = self._scaled(g).flatten(0, 1)
        like = flat.new_empty(flat.shape[0], *self.source[1:])
        shares: Tensor = self._back(flat, like).unflatten(0, g.shape[:2])
        return shares

    def _scaled(self, t: Tensor) -> Tensor:
        return t * self.scale.to(t) if isinstance(self.scale, Tensor) else t

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        """Return the sums with f of the weight within each window."""
        weight = self._weight if self.scale is None else self._weight * self.scale
        return replace(self, scale=f(weight) / self._weight)

    def _pool(self, x: Tensor) -> Tensor:
        return aten.avg_pool2d(x, *self._all)  # type: ignore[no-any-return]

    def _back(self, g: Tensor, like: Tensor) -> Tensor:
        return aten.avg_pool2d_backward(g, like, *self._all)  # type: ignore[no-any-return]

    @cached_property
    def _weight(self) -> Tensor:
        """What each window multiplies its entries by, (C, *out)."""
        ones = torch.ones(1, *self.source[1:], dtype=torch.float64)
        counted = aten.avg_pool2d(ones, *self._all[:4], False, 1)
        weight: Tensor = self._pool(ones) / counted
        return weight[0]

    @property
    def _all(self) -> tuple[Any, ...]:
        defaults: list[Any] = [[], [], [0, 0], False, True, None]
        kernel, stride, *rest = [*self.settings, *defaults[len(self.settings) :]]
        return (kernel, stride or kernel, *rest)


class AdaptiveAverage(Average):
    """Average pooling to a given output size, which is what ``settings`` holds."""

    def _pool(self, x: Tensor) -> Tensor:
        return aten._adaptive_avg_pool2d(x, self.settings)  # type: ignore[no-any-return]

    def _back(self, g: Tensor, like: Tensor) -> Tensor:
        return aten._adaptive_avg_pool2d_backward(g, like)  # type: ignore[no-any-return]

    @cached_property
    def _weight(self) -> Tensor:
        height, width = (_window_sizes(i, o) for i, o in zip(self.source[2:], self.settings, strict=True))
        return 1 / (height[:, None] * width).double()


def _window_sizes(length: int, windows: int) -> Tensor:
    i = torch.arange(windows)
    return ((i + 1) * length + windows - 1) // windows - i * length // windows


def _average_step(call: Call, edges: Edges) -> Affine | None:
    """Return a convolution of equal weights, whose norm is well known, where all windows are of one size."""
    ((x, operator),) = edges
    assert isinstance(operator, Average)
    size, out = x.shape[2:], call.out.shape[2:]
    padding: Shape
    if isinstance(operator, AdaptiveAverage):
        kernel = stride = tuple(n // o for n, o in zip(size, out, strict=True))
        padding, same = (0, 0), not any(n % o for n, o in zip(size, out, strict=True))
    else:
        window, steps, pads, ceil, counts_padding, divisor = operator._all
        kernel, stride, padding = full(window, 2), full(steps, 2), full(pads, 2)
        same = not ceil and divisor is None and (counts_padding or not any(padding))
    if not same:
        return affine(call, edges)
    weight = torch.full((x.shape[1], 1, *kernel), 1 / prod(kernel), dtype=x.dtype)
    equal = Convolution(weight, stride, padding, (1, 1), x.shape[1], tuple(x.shape), tuple(call.out.shape))
    return Affine(*call.shapes, equal, torch.zeros((), dtype=x.dtype))


@rule("avg_pool2d", step=_average_step)
def _avg_pool(call: Call) -> Edges | None:
    if call.kwargs or call.x.ndim != 4:
        return None
    return [(call.x, Average(tuple(call.args[1:]), tuple(call.x.shape)))]


@rule("_adaptive_avg_pool2d", step=_average_step)
def _adaptive_avg_pool(call: Call) -> Edges | None:
    if call.x.ndim != 4:
        return None
    return [(call.x, AdaptiveAverage(tuple(call.args[1]), tuple(call.x.shape)))]
