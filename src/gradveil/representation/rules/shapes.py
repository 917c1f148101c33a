"""The same entries elsewhere: reshapes, permutations, padding, slices, concatenation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.rules.base import Call, Edges, Operator, Shape, Walked, affine, plain, rule


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
class Rearrange(Move):
    """Entries at other places: permutations, slices, and zeros around them."""

    there: Callable[[Tensor], Tensor]  # of a stack (K, B, ...)
    back: Callable[[Tensor], Tensor]
    source: Shape
    target: Shape
    mixes: bool = False  # the first dimension does not count the examples before and after

    def push(self, t: Tensor) -> Tensor:
        return self.there(_batch(t, self.source[0]) if self.mixes else t)

    def pull(self, g: Tensor) -> Tensor:
        return self.back(_batch(g, self.target[0]) if self.mixes else g)

    @property
    def separate(self) -> bool:
        return not self.mixes

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.mixes:
            return None
        places = torch.arange(1, prod(self.source[1:]) + 1, device=index.device).view(1, 1, *self.source[1:])
        found = self.there(places).flatten()[index]  # 0: none
        return (found - 1).clamp_min(0), factor * (found > 0)


def _padded(call: Call, x: Tensor, amounts: Sequence[int]) -> tuple[Tensor, Operator]:
    """Return zeros before and after x, from the last dimension backwards; or (negative) a part of it cut out."""
    cut = [-a for a in amounts]
    shapes = tuple(x.shape), tuple(call.out.shape)
    return x, Rearrange(lambda t: F.pad(t, list(amounts)), lambda g: F.pad(g, cut), *shapes)


def _along(dim: int, before: int, after: int, ndim: int) -> list[int]:
    return [*[0, 0] * (ndim - 1 - dim), before, after]


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
    there, back = ([0, *(d + 1 for d in some)] for some in (dims, [dims.index(d) for d in range(x.ndim)]))
    shapes = tuple(x.shape), tuple(call.out.shape)
    return [(x, Rearrange(lambda t: t.permute(there), lambda g: g.permute(back), *shapes, mixes=dims[0] != 0))]


@rule("cat", step=affine)
def _cat(call: Call) -> Edges | None:
    dim, size = call.arg(1, "dim", 0) % call.out.ndim, call.out.shape
    if dim == 0:
        return None
    edges: Edges = []
    start = 0
    for tensor in call.x:
        end = start + tensor.shape[dim]
        if call.depends(tensor):
            edges.append(_padded(call, tensor, _along(dim, start, size[dim] - end, len(size))))
        start = end
    return edges


@rule("slice", step=affine)
def _slice(call: Call) -> Edges | None:
    x, dim = call.x, call.arg(1, "dim", 0) % call.x.ndim
    start = min(call.arg(2, "start", 0) or 0, x.shape[dim])
    if call.arg(4, "step", 1) != 1 or dim == 0:
        return None
    before = max(0, start + x.shape[dim]) if start < 0 else start
    after = x.shape[dim] - before - call.out.shape[dim]
    return [_padded(call, x, _along(dim, -before, -after, x.ndim))]


@rule("split", "split_with_sizes", several=True)
def _split(call: Call) -> Edges | None:
    x, dim = call.x, call.arg(2, "dim", 0) % call.x.ndim
    before = sum(out.shape[dim] for out in call.outs[: call.at])
    after = x.shape[dim] - before - call.out.shape[dim]
    return [_padded(call, x, _along(dim, -before, -after, x.ndim))] if dim else None


@rule("constant_pad_nd", step=affine)
def _pad(call: Call) -> Edges | None:
    amounts = call.args[1]
    return None if len(amounts) >= 2 * call.x.ndim else [_padded(call, call.x, amounts)]


@rule("select")
def _select(call: Call) -> Edges | None:
    return _selected(call, call.args[1], call.args[2])


@rule("unbind", several=True)
def _unbind(call: Call) -> Edges | None:
    return _selected(call, call.arg(1, "dim", 0), call.at)


def _selected(call: Call, dim: int, at: int) -> Edges | None:
    """Return one slice of a dimension, which goes."""
    x, dim = call.x, dim % call.x.ndim
    at %= x.shape[dim]
    around = _along(dim, at, x.shape[dim] - at - 1, x.ndim)
    if x.ndim == 1:
        return None
    shapes = tuple(x.shape), tuple(call.out.shape)
    there, back = (lambda t: t.select(dim + 1, at)), (lambda g: F.pad(g.unsqueeze(dim + 1), around))
    return [(x, Rearrange(there, back, *shapes, mixes=dim == 0))]
