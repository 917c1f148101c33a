"""Pooling as a linear map: maximum (a choice of entries) and average."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradveil.layers.operators import Operator, Shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Choose(Operator):
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

    def spread(self, s: Tensor) -> Tensor:
        """Return the chosen entries."""
        return self.push(s)

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the places that were chosen."""
        size = prod(self.source[2:])
        channel = torch.arange(self.source[1], device=self.index.device).view(1, -1, *[1] * (self.index.ndim - 2))
        places = (self.index + channel * size).flatten(1)  # (N, out)
        return places.gather(1, index.expand(places.shape[0], -1)), factor


@dataclass(frozen=True)
class Average(Operator):
    """Average pooling over windows; ``settings`` are those of the operation after its input."""

    settings: tuple[Any, ...]
    source: Shape

    def push(self, t: Tensor) -> Tensor:
        """Return the averages."""
        return aten.avg_pool2d(t.flatten(0, 1), *self.settings).unflatten(0, t.shape[:2])  # type: ignore[no-any-return]

    def pull(self, g: Tensor) -> Tensor:
        """Return each window's share."""
        flat = g.flatten(0, 1)
        like = flat.new_empty(1).expand(flat.shape[0], *self.source[1:])
        full = _all_settings(self.settings)
        return aten.avg_pool2d_backward(flat, like, *full).unflatten(0, g.shape[:2])  # type: ignore[no-any-return]

    def spread(self, s: Tensor) -> Tensor:
        """Return the averages times the weight within each window."""
        return self.push(s) * self._weight.to(s)

    @cached_property
    def _weight(self) -> Tensor:
        ones = torch.ones(1, *self.source[1:])
        kernel, stride, padding, ceil, _, _ = _all_settings(self.settings)
        counted = aten.avg_pool2d(ones, kernel, stride, padding, ceil, False, 1)
        return aten.avg_pool2d(ones, *self.settings) / counted  # type: ignore[no-any-return]


def _all_settings(given: tuple[Any, ...]) -> tuple[Any, ...]:
    defaults: list[Any] = [[], [], [0, 0], False, True, None]
    kernel, stride, *rest = [*given, *defaults[len(given) :]]
    return (kernel, stride or kernel, *rest)


@dataclass(frozen=True)
class AdaptiveAverage(Operator):
    """Average pooling to a given output size."""

    size: tuple[int, ...]
    source: Shape

    def push(self, t: Tensor) -> Tensor:
        """Return the averages."""
        return aten._adaptive_avg_pool2d(t.flatten(0, 1), self.size).unflatten(0, t.shape[:2])  # type: ignore[no-any-return]

    def pull(self, g: Tensor) -> Tensor:
        """Return each window's share."""
        flat = g.flatten(0, 1)
        like = flat.new_empty(flat.shape[0], *self.source[1:])
        return aten._adaptive_avg_pool2d_backward(flat, like).unflatten(0, g.shape[:2])  # type: ignore[no-any-return]

    def spread(self, s: Tensor) -> Tensor:
        """Return the averages times the weight within each window."""
        height, width = (_window_sizes(i, o) for i, o in zip(self.source[2:], self.size, strict=True))
        return self.push(s) / (height[:, None] * width).to(s)


def _window_sizes(length: int, windows: int) -> Tensor:
    i = torch.arange(windows)
    return ((i + 1) * length + windows - 1) // windows - i * length // windows
