"""Matrices on the last dimension: linear layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.layers.rules.base import Call, Edges, Operator, Shape, Walked, affine, plain, rule, wide


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

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        """Return the matrix f(W)."""
        return replace(self, weight=f(self.weight))

    def rows(self, index: Tensor) -> Tensor | None:
        """Return rows of W."""
        return self.weight[index] if len(self.batch_shape) == 1 else None

    @property
    def separate(self) -> bool:
        """Whether the last dimension, which the matrix mixes, is not the first."""
        return bool(self.batch_shape)

    @property
    def cost(self) -> int:
        """One multiplication per weight, for every place the matrix is applied at."""
        return self.weight.numel() * prod(self.batch_shape[1:])


@plain(nn.Linear)
def _walked(layer: nn.Linear, x: Tensor) -> Walked:
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
