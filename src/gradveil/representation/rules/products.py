"""Products with matrices, and what transformers have beside: softmax, layer and group norm."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.rules.base import Call, Edges, Operator, Shape, Walked, affine, plain, rule, wide


@dataclass(frozen=True)
class Dense(Operator):
    """A matrix on the last dimension."""

    weight: Tensor  # (out, in)
    batch_shape: Shape  # of the input, less its last dimension

    def push(self, t: Tensor) -> Tensor:
        return t @ self.weight.t()

    def pull(self, g: Tensor) -> Tensor:
        return g @ self.weight

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return replace(self, weight=f(self.weight))

    def rows(self, index: Tensor) -> Tensor | None:
        return self.weight[index] if len(self.batch_shape) == 1 else None

    @property
    def separate(self) -> bool:
        return bool(self.batch_shape)

    @property
    def cost(self) -> int:
        return self.weight.numel() * prod(self.batch_shape[1:])


@plain(nn.Linear)
def _walked_linear(layer: nn.Linear, x: Tensor) -> Walked:
    return F.linear(x, layer.weight, layer.bias), Dense(wide(layer.weight.detach()), tuple(x.shape[:-1]))


@rule("addmm", step=affine)
def _addmm(call: Call) -> Edges | None:
    bias, x, weight = call.args[:3]
    return None if call.kwargs or call.depends(bias) else _dense(call, x, weight.t())


@rule("mm", step=affine)
def _mm(call: Call) -> Edges | None:
    return _dense(call, call.x, call.args[1].t())


@rule("linear", step=affine)
def _linear(call: Call) -> Edges | None:
    return None if any(map(call.depends, call.args[2:])) else _dense(call, call.x, call.args[1])


def _dense(call: Call, x: Tensor, weight: Tensor) -> Edges | None:
    if not call.depends(x) or any(call.depends(a) for a in call.args if a is not x):
        return None
    return [(x, Dense(wide(weight.detach()), tuple(x.shape[:-1])))]


class ByValue(Operator):
    """A map that follows the values: a matrix of its own at each place, which is never written out."""

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        raise NotImplementedError

    def shared(self) -> Operator | None:
        return None


@dataclass(frozen=True)
class Softmax(ByValue):
    """diag(p) - p pᵀ on the last dimension."""

    p: Tensor  # (B, ..., n)

    def push(self, t: Tensor) -> Tensor:
        return self.p * (t - (self.p * t).sum(-1, keepdim=True))

    def pull(self, g: Tensor) -> Tensor:
        return self.push(g)

    def spread(self, s: Tensor) -> Tensor:
        squares = self.p * self.p
        return torch.addcmul(s, self.p, s, value=-2).add_((squares * s).sum(-1, keepdim=True)).mul_(squares)


@rule("_softmax", "_safe_softmax")
def _softmax(call: Call) -> Edges | None:
    last = call.args[1] % call.x.ndim == call.x.ndim - 1
    return [(call.x, Softmax(wide(call.out)))] if last and call.x.ndim > 1 else None


@dataclass(frozen=True)
class Standardise(ByValue):
    """diag(d) (I - (1 1ᵀ + h hᵀ) / n) on groups of n entries: they get mean 0 and variance 1, and are scaled."""

    d: Tensor  # (B, *groups, n or 1)
    h: Tensor  # (B, *groups, n), the entries with mean 0 and variance 1

    def push(self, t: Tensor) -> Tensor:
        return self._scaled(self._centred(self._view(t)), t)

    def pull(self, g: Tensor) -> Tensor:
        return self._shaped(self._centred(self.d * self._view(g)), g)

    def spread(self, s: Tensor) -> Tensor:
        n, view = self.h.shape[-1], self._view(s)
        along = self.h * view
        sums = [part.sum(-1, keepdim=True) / n**2 for part in (view, along, self.h * along)]
        own = view * (1 - 2 / n) - (2 / n) * self.h * along
        return self._scaled(own + sums[0] + self.h * (2 * sums[1] + self.h * sums[2]), s, self.d * self.d)

    def _view(self, t: Tensor) -> Tensor:
        return t.reshape(*t.shape[:2], *self.h.shape[1:])

    def _shaped(self, view: Tensor, like: Tensor) -> Tensor:
        return view.reshape(*view.shape[:2], *like.shape[2:])

    def _centred(self, view: Tensor) -> Tensor:
        return view - view.mean(-1, keepdim=True) - self.h * (self.h * view).mean(-1, keepdim=True)

    def _scaled(self, view: Tensor, like: Tensor, by: Tensor | None = None) -> Tensor:
        return self._shaped(view * (self.d if by is None else by), like)


@rule("native_layer_norm")
def _layer_norm(call: Call) -> Edges | None:
    x, shape, weight, bias, _ = call.args
    if len(shape) == x.ndim or any(map(call.depends, (weight, bias))):
        return None
    groups = *x.shape[: x.ndim - len(shape)], -1
    return _standardised(call, groups, None if weight is None else weight.flatten())


@rule("native_group_norm")
def _group_norm(call: Call) -> Edges | None:
    x, weight, bias, examples, channels, _, groups, _ = call.args
    if any(map(call.depends, (weight, bias))):
        return None
    if weight is not None:
        weight = weight.view(groups, channels // groups, 1).expand(-1, -1, x[0, 0].numel()).flatten(1)
    return _standardised(call, (examples, groups, -1), weight)


def _standardised(call: Call, groups: tuple[int, ...], weight: Tensor | None) -> Edges | None:
    mean, rstd = (wide(t).reshape(*groups[:-1], 1) for t in call.outs[1:])
    h = (wide(call.x).reshape(groups) - mean) * rstd
    return [(call.x, Standardise(rstd if weight is None else rstd * wide(weight), h))]


@dataclass(frozen=True)
class Product(ByValue):
    """The product with a matrix of its own for each entry of the first dimension, from the right or from the left."""

    matrix: Tensor  # (B, n, m)
    places: int  # rows (or columns) of the other factor
    right: bool

    def push(self, t: Tensor) -> Tensor:
        return t @ self.matrix if self.right else self.matrix @ t

    def pull(self, g: Tensor) -> Tensor:
        return g @ self.matrix.mT if self.right else self.matrix.mT @ g

    def spread(self, s: Tensor) -> Tensor:
        return Product(self.matrix.square(), self.places, self.right).push(s)

    @property
    def cost(self) -> int:
        return prod(self.matrix.shape[1:]) * self.places


@rule("bmm")
def _bmm(call: Call) -> Edges | None:
    a, b = call.args[:2]
    left = [(a, Product(wide(b).clone(), a.shape[1], right=True))] if call.depends(a) else []
    right = [(b, Product(wide(a).clone(), b.shape[2], right=False))] if call.depends(b) else []
    return [*left, *right]
