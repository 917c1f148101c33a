"""Linear maps between two tensors of a forward pass: what an operation does to small changes of its input.

Every map is applied to many vectors at once. A stack of vectors is (K, B, ...): K vectors for each of the B
examples of a tensor (B, ...); B may be 1 where all examples share the vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor in at least single precision: half precision is too coarse for products of slopes."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Operator(ABC):
    """A linear map A, one block per example."""

    @abstractmethod
    def push(self, t: Tensor) -> Tensor:
        """Return A t."""

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Return Aᵀ g."""

    @abstractmethod
    def spread(self, s: Tensor) -> Tensor:
        """Return (A∘A) s: the same map with every entry of A squared."""

    def pull_any(self, g: Tensor) -> Tensor:
        """Return the entries of Aᵀ g in any order and with any zeros between them: enough for a norm."""
        return self.pull(g)

    def pull_scaled(self, g: Tensor, scale: "Scale") -> Tensor:
        """Return S Aᵀ g for the scaling S of the input: fused where that saves a pass over memory."""
        return scale.pull(self.pull(g))

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Follow output entries to the one input entry each is a multiple of; None where there is no such one.

        ``index`` (n, L) holds flat positions within one example, ``factor`` (n, L) the multiples so far; n is 1 or N.
        """
        return None

    def rows(self, index: Tensor) -> Tensor | None:
        """Return the rows of A (K, n, *in) at flat output positions (K, n), where that beats pulling unit vectors."""
        return None

    @property
    def cost(self) -> int:
        """Multiplications that one vector of one example takes; 0 where they do not count."""
        return 0


def _batch(t: Tensor, size: int) -> Tensor:
    return t if t.shape[1] == size else t.expand(-1, size, *t.shape[2:])


@dataclass(frozen=True)
class Reshape(Operator):
    """The same entries in the same order under another shape."""

    source: Shape
    target: Shape

    def push(self, t: Tensor) -> Tensor:
        """Return the stack in the output's shape."""
        return _reshape(t, self.source, self.target)

    def pull(self, g: Tensor) -> Tensor:
        """Return the stack in the input's shape."""
        return _reshape(g, self.target, self.source)

    def spread(self, s: Tensor) -> Tensor:
        """Return the stack in the output's shape."""
        return self.push(s)

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return both as they are: flat positions stay."""
        return (index, factor) if self.source[0] == self.target[0] else None


def _reshape(t: Tensor, source: Shape, target: Shape) -> Tensor:
    if source[0] == target[0]:
        return t.reshape(*t.shape[:2], *target[1:])
    return _batch(t, source[0]).reshape(t.shape[0], *target)


@dataclass(frozen=True)
class Permute(Operator):
    """Dimensions in another order."""

    dims: tuple[int, ...]
    source: Shape

    def push(self, t: Tensor) -> Tensor:
        """Return the stack with its dimensions reordered."""
        return self._apply(t, self.dims)

    def pull(self, g: Tensor) -> Tensor:
        """Return the stack with its dimensions put back."""
        return self._apply(g, tuple(self.dims.index(d) for d in range(len(self.dims))))

    def spread(self, s: Tensor) -> Tensor:
        """Return the stack with its dimensions reordered."""
        return self.push(s)

    def _apply(self, t: Tensor, dims: tuple[int, ...]) -> Tensor:
        if dims[0] != 0:
            t = _batch(t, self.source[0])
        return t.permute(0, *(d + 1 for d in dims))

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return where each output entry came from."""
        if self.dims[0] != 0:
            return None
        places = torch.arange(prod(self.source[1:]), device=index.device).view(1, *self.source[1:])
        return places.permute(self.dims).flatten()[index], factor


@dataclass(frozen=True)
class Scale(Operator):
    """Every entry times a constant: slopes of an activation, a dropout mask, batch norm, a sum's sign.

    ``by`` broadcasts against the output, and the input may broadcast as well (dimensions of size 1).
    """

    by: Tensor | float
    source: Shape
    target: Shape

    def push(self, t: Tensor) -> Tensor:
        """Return the scaled stack."""
        return self._widened(t * self.by if self._scales else t)

    def _widened(self, t: Tensor) -> Tensor:
        return t if self.source == self.target else t.expand(-1, t.shape[1], *self.target[1:])

    def pull(self, g: Tensor) -> Tensor:
        """Return the scaled stack, summed where the input was broadcast."""
        out = self._times(g) if self._scales else g
        if self.source == self.target:
            return out
        spread_over = [d + 1 for d in range(1, len(self.source)) if self.source[d] != self.target[d]]
        return out.sum(spread_over, keepdim=True) if spread_over else out

    def _times(self, g: Tensor) -> Tensor:
        by = self.last
        if by is None:
            return g * self.by
        # Written where the next convolution wants it: channels last, whatever the order of what comes in.
        k, n = g.shape[0], max(g.shape[1], by.shape[0])
        out = torch.empty(k, n, *by.shape[1:], dtype=g.dtype, device=g.device)
        return torch.mul(g.permute(0, 1, 3, 4, 2), by, out=out).permute(0, 1, 4, 2, 3)

    @cached_property
    def last(self) -> Tensor | None:
        """The constants with channels last (N, H, W, C), where they are one for each entry of an image on the CPU."""
        by = self.by
        if not isinstance(by, Tensor) or by.is_cuda or by.ndim != 4 or by.shape[1:] != self.source[1:]:
            return None
        return by.permute(0, 2, 3, 1).contiguous()

    def spread(self, s: Tensor) -> Tensor:
        """Return the stack times the squared constants."""
        return self._widened(s * (self.by * self.by) if self._scales else s)

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the same positions, with the constants found there as further factors."""
        if self.source != self.target:
            return None
        if not isinstance(self.by, Tensor):
            return index, factor * self.by
        by = self.by.expand(self.target).flatten(1)  # (N, L')
        return index, factor * by.gather(1, index.expand(by.shape[0], -1))

    @property
    def _scales(self) -> bool:
        return isinstance(self.by, Tensor) or self.by != 1.0


@dataclass(frozen=True)
class Pad(Operator):
    """Zeros around the tensor, or (negative) a part of it cut out: padding, concatenation, slices."""

    amounts: tuple[int, ...]  # before and after, from the last dimension backwards

    def push(self, t: Tensor) -> Tensor:
        """Return the padded stack."""
        return F.pad(t, self.amounts)

    def pull(self, g: Tensor) -> Tensor:
        """Return what is within."""
        return F.pad(g, tuple(-a for a in self.amounts))

    def spread(self, s: Tensor) -> Tensor:
        """Return the padded stack."""
        return self.push(s)


@dataclass(frozen=True)
class Dense(Operator):
    """A matrix on the last dimension."""

    weight: Tensor  # (out, in)
    batch_shape: Shape  # of the input, less its last dimension

    def push(self, t: Tensor) -> Tensor:
        """Return W t."""
        return t @ self.weight.t()

    def pull(self, g: Tensor) -> Tensor:
        """Return Wᵀ g."""
        return g @ self.weight

    def spread(self, s: Tensor) -> Tensor:
        """Return (W∘W) s."""
        return s @ self.weight.square().t()

    def rows(self, index: Tensor) -> Tensor | None:
        """Return rows of W."""
        return self.weight[index] if len(self.batch_shape) == 1 else None

    @property
    def cost(self) -> int:
        """One multiplication per weight, for every place the matrix is applied at."""
        return self.weight.numel() * prod(self.batch_shape[1:])


@dataclass(frozen=True)
class Mean(Operator):
    """The mean (or, with ``scale`` 1, the sum) over some dimensions."""

    dims: tuple[int, ...]
    keepdim: bool
    source: Shape
    scale: float  # 1 / how many are averaged

    def push(self, t: Tensor) -> Tensor:
        """Return the means."""
        return self._sum(t) * self.scale

    def pull(self, g: Tensor) -> Tensor:
        """Return each share of the mean."""
        if not self.keepdim:
            for d in self.dims:
                g = g.unsqueeze(d + 1)
        return (g * self.scale).expand(*g.shape[:2], *self.source[1:])

    def spread(self, s: Tensor) -> Tensor:
        """Return the sums times the squared share."""
        return self._sum(s) * self.scale**2

    def _sum(self, t: Tensor) -> Tensor:
        return t.sum([d + 1 for d in self.dims], keepdim=self.keepdim)


def pad_along(dim: int, before: int, after: int, ndim: int) -> Pad:
    """Return the padding of one dimension."""
    amounts = [0, 0] * (ndim - 1 - dim) + [before, after]
    return Pad(tuple(amounts))


def normal_dims(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Return dimensions counted from the front, in order."""
    return tuple(sorted(d % ndim for d in dims))
