"""The same entries elsewhere: reshapes, permutations, padding, slices, concatenation."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.layers.rules.base import Call, Edges, Operator, Shape, Walked, affine, plain, rule


class Move(Operator):
    """A map whose entries are 0 and 1."""

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return self


def _batch(t: Tensor, size: int) -> Tensor:
    return t if t.shape[1] == size else t.expand(-1, size, *t.shape[2:])


@dataclass(frozen=True)
class Reshape(Move):
    """The same entries in the same order under another shape."""

    source: Shape
    target: Shape

    def push(self, t: Tensor) -> Tensor:
        return _reshape(t, self.source, self.target)

    def pull(self, g: Tensor) -> Tensor:
        return _reshape(g, self.target, self.source)

    def shared(self) -> Operator | None:
        return self if self.separate else None

    @property
    def separate(self) -> bool:
        return self.source[0] == self.target[0]

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        return (index, factor) if self.separate else None


def _reshape(t: Tensor, source: Shape, target: Shape) -> Tensor:
    if source[0] == target[0]:
        return t.reshape(*t.shape[:2], *target[1:])
    return _batch(t, source[0]).reshape(t.shape[0], *target)


@dataclass(frozen=True)
class Permute(Move):
    """Dimensions in another order."""

    dims: tuple[int, ...]
    source: Shape

    def push(self, t: Tensor) -> Tensor:
        return self._apply(t, self.dims, self.source[0])

    def pull(self, g: Tensor) -> Tensor:
        back = tuple(self.dims.index(d) for d in range(len(self.dims)))
        return self._apply(g, back, self.source[self.dims[0]])

    def _apply(self, t: Tensor, dims: tuple[int, ...], first: int) -> Tensor:
        if dims[0] != 0:
            t = _batch(t, first)
        return t.permute(0, *(d + 1 for d in dims))

    def shared(self) -> Operator | None:
        return self if self.separate else None

    @property
    def separate(self) -> bool:
        return self.dims[0] == 0

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.separate:
            return None
        places = torch.arange(prod(self.source[1:]), device=index.device).view(1, *self.source[1:])
        return places.permute(self.dims).flatten()[index], factor


@dataclass(frozen=True)
class Pad(Move):
    """Zeros around the tensor, or (negative) a part of it cut out: padding, concatenation, slices."""

    amounts: tuple[int, ...]  # before and after, from the last dimension backwards

    @classmethod
    def along(cls, dim: int, before: int, after: int, ndim: int) -> "Pad":
        return cls((*[0, 0] * (ndim - 1 - dim), before, after))

    def push(self, t: Tensor) -> Tensor:
        return F.pad(t, self.amounts)

    def pull(self, g: Tensor) -> Tensor:
        return F.pad(g, tuple(-a for a in self.amounts))


@dataclass(frozen=True)
class Select(Move):
    """One slice of a dimension, which goes."""

    dim: int
    at: int
    source: Shape

    def push(self, t: Tensor) -> Tensor:
        return (t if self.dim else _batch(t, self.source[0])).select(self.dim + 1, self.at)

    def pull(self, g: Tensor) -> Tensor:
        around = Pad.along(self.dim, self.at, self.source[self.dim] - self.at - 1, len(self.source))
        return around.push(g.unsqueeze(self.dim + 1))

    def shared(self) -> Operator | None:
        return self if self.separate else None

    @property
    def separate(self) -> bool:
        return self.dim != 0

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.separate:
            return None
        places = torch.arange(prod(self.source[1:]), device=index.device).view(1, *self.source[1:])
        return places.select(self.dim, self.at).flatten()[index], factor


def _same_entries(call: Call) -> Edges | None:
    if not (call.x.ndim and call.out.ndim):
        return None
    return [(call.x, Reshape(tuple(call.x.shape), tuple(call.out.shape)))]


rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "clone", "alias", "contiguous",
     "detach", step=affine)(_same_entries)  # fmt: skip
rule("_to_copy")(_same_entries)  # no step: another precision rounds


@plain(nn.Flatten, nn.Identity)
def _flatten(layer: nn.Module, x: Tensor) -> Walked:
    out = layer(x)
    return out, Reshape(tuple(x.shape), tuple(out.shape))


@rule("permute", "transpose", "t", step=affine)
def _permute(call: Call) -> Edges | None:
    x, *rest = call.args
    if rest and not isinstance(rest[0], int):
        dims = [d % x.ndim for d in rest[0]]
    else:
        first, second = (d % x.ndim for d in (rest or (0, -1)))
        dims = list(range(x.ndim))
        dims[first], dims[second] = second, first
    return [(x, Permute(tuple(dims), tuple(x.shape)))]


@rule("cat", step=affine)
def _cat(call: Call) -> Edges | None:
    tensors, out = call.x, call.out
    dim = call.arg(1, "dim", 0) % out.ndim
    if dim == 0:
        return None
    edges: Edges = []
    start = 0
    for tensor in tensors:
        size = tensor.shape[dim]
        if call.depends(tensor):
            edges.append((tensor, Pad.along(dim, start, out.shape[dim] - start - size, out.ndim)))
        start += size
    return edges


@rule("slice", step=affine)
def _slice(call: Call) -> Edges | None:
    x, dim = call.x, call.arg(1, "dim", 0) % call.x.ndim
    start = min(call.arg(2, "start", 0) or 0, x.shape[dim])
    if call.arg(4, "step", 1) != 1 or dim == 0:
        return None
    before = max(0, start + x.shape[dim]) if start < 0 else start
    after = x.shape[dim] - before - call.out.shape[dim]
    return [(x, Pad.along(dim, -before, -after, x.ndim))]


@rule("select")
def _select(call: Call) -> Edges | None:
    x, dim, at = call.args
    return [(x, Select(dim % x.ndim, at % x.shape[dim], tuple(x.shape)))] if x.ndim > 1 else None


@rule("unbind", several=True)
def _unbind(call: Call) -> Edges | None:
    dim = call.arg(1, "dim", 0) % call.x.ndim
    return [(call.x, Select(dim, call.at, tuple(call.x.shape)))] if call.x.ndim > 1 else None


@rule("split", "split_with_sizes", several=True)
def _split(call: Call) -> Edges | None:
    x, dim = call.x, call.arg(2, "dim", 0) % call.x.ndim
    before = sum(out.shape[dim] for out in call.outs[: call.at])
    cut = Pad.along(dim, -before, before + call.out.shape[dim] - x.shape[dim], x.ndim)
    return [(x, cut)] if dim else None


@rule("constant_pad_nd", step=affine)
def _pad(call: Call) -> Edges | None:
    amounts = tuple(call.args[1])
    return None if len(amounts) >= 2 * call.x.ndim else [(call.x, Pad(amounts))]
