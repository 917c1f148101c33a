"""Sums and products with constants, sums over dimensions, and what is a scaling: fixed batch norm, dropout."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradveil.representation.rules.base import Affine, Call, Edges, Operator, Shape, affine, rule, wide


@dataclass(frozen=True)
class Scale(Operator):
    """Every entry times a constant: slopes of an activation, a dropout mask, batch norm, a sum's sign.

    ``by`` broadcasts against the output, and the input may broadcast as well (dimensions of size 1).
    """

    by: Tensor | float
    source: Shape
    target: Shape

    def push(self, t: Tensor) -> Tensor:
        return self._widened(t * self.by if self._scales else t)

    def _widened(self, t: Tensor) -> Tensor:
        return t if self.source == self.target else t.expand(-1, t.shape[1], *self.target[1:])

    def pull(self, g: Tensor) -> Tensor:
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

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return replace(self, by=f(self.by))

    def shared(self) -> Operator | None:
        by = self.by
        if not isinstance(by, Tensor) or by.ndim < len(self.target):
            return self
        return replace(self, by=by[:1]) if bool((by == by[:1]).all()) else None

    @property
    def one(self) -> Tensor:
        """The constants of one example, which is all there is where they are shared."""
        by = torch.as_tensor(self.by, dtype=torch.float64)
        return by.expand(1, *self.target[1:])[0]

    def trace(self, index: Tensor, factor: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.source != self.target:
            return None
        if not isinstance(self.by, Tensor):
            return index, factor * self.by
        by = self.by.expand(self.target).flatten(1)  # (N, L')
        return index, factor * by.gather(1, index.expand(by.shape[0], -1))

    @property
    def _scales(self) -> bool:
        return isinstance(self.by, Tensor) or self.by != 1.0


def scaled(x: Tensor, by: Tensor | float, out: Tensor) -> Edges | None:
    """Return the edge of an operation whose output is ``by`` times its input, each broadcast to the output."""
    if x.ndim != out.ndim or x.shape[0] != out.shape[0]:
        return None  # broadcast along examples
    if isinstance(by, Tensor) and by.ndim:
        by = wide(by).to(wide(out).dtype)
        return [(x, Scale(by, tuple(x.shape), tuple(out.shape)))]
    return [(x, Scale(float(by), tuple(x.shape), tuple(out.shape)))]


def _joined(edges: list[Edges | None]) -> Edges | None:
    return None if any(e is None for e in edges) else [edge for e in edges if e is not None for edge in e]


@rule("add", step=affine)
def _add(call: Call) -> Edges | None:
    return _sum(call, 1, call.arg(2, "alpha", 1))


@rule("sub", step=affine)
def _sub(call: Call) -> Edges | None:
    return _sum(call, 1, -call.arg(2, "alpha", 1))


@rule("rsub", step=affine)
def _rsub(call: Call) -> Edges | None:
    return _sum(call, -call.arg(2, "alpha", 1), 1)


def _sum(call: Call, *factors: float) -> Edges | None:
    pairs = zip(call.args[:2], factors, strict=True)
    return _joined([scaled(a, factor, call.out) for a, factor in pairs if call.depends(a)])


@rule("expand")
def _expand(call: Call) -> Edges | None:
    return scaled(call.x, 1.0, call.out)


@rule("neg", step=affine)
def _neg(call: Call) -> Edges | None:
    return scaled(call.x, -1.0, call.out)


@rule("mul", step=affine)
def _mul(call: Call) -> Edges | None:
    a, b = call.args[:2]
    return _joined([scaled(x, _fixed(by), call.out) for x, by in ((a, b), (b, a)) if call.depends(x)])


@rule("div", step=affine)
def _div(call: Call) -> Edges | None:
    a, b = call.args[:2]
    return None if call.kwargs or call.depends(b) else scaled(a, 1 / _fixed(b), call.out)


def _fixed(by: Any) -> Any:
    return wide(by).clone() if isinstance(by, Tensor) else by  # a copy: the model may write to its own


@dataclass(frozen=True)
class Mean(Operator):
    """The mean (or, with ``scale`` 1, the sum) over some dimensions."""

    dims: tuple[int, ...]
    keepdim: bool
    source: Shape
    scale: float  # 1 / how many are averaged

    def push(self, t: Tensor) -> Tensor:
        return t.sum([d + 1 for d in self.dims], keepdim=self.keepdim) * self.scale

    def pull(self, g: Tensor) -> Tensor:
        if not self.keepdim:
            for d in self.dims:
                g = g.unsqueeze(d + 1)
        return (g * self.scale).expand(*g.shape[:2], *self.source[1:])

    def entrywise(self, f: Callable[[Any], Any]) -> Operator:
        return replace(self, scale=f(self.scale))


@rule("mean", step=affine)
def _mean(call: Call) -> Edges | None:
    return _total(call, mean=True)


@rule("sum", step=affine)
def _total(call: Call, mean: bool = False) -> Edges | None:
    x, over = call.x, call.arg(1, "dim", None)
    if not over:
        return None
    dims = tuple(sorted(d % x.ndim for d in ([over] if isinstance(over, int) else over)))
    if dims[0] == 0:
        return None  # examples would mix
    share = 1 / prod(x.shape[d] for d in dims) if mean else 1.0
    return [(x, Mean(dims, bool(call.arg(2, "keepdim", False)), tuple(x.shape), share))]


def _batch_norm_step(call: Call, edges: Edges) -> Affine | None:
    """Return the step with the sizes of both terms of its offset, bias - factor x mean: they may cancel."""
    step = affine(call, edges)
    if step is None:
        return None
    _, _, bias, mean = call.args[:4]
    assert isinstance(step.operator, Scale)
    shape = (-1, *[1] * (len(step.out_shape) - 1))
    terms = (step.operator.one * mean.view(shape)).abs()
    return replace(step, terms=terms if bias is None else terms + bias.view(shape).abs())


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", step=_batch_norm_step)
def _batch_norm(call: Call) -> Edges | None:
    _, weight, bias, mean, var, training, _, eps = call.args
    return None if training else _normalised(call, weight, bias, mean, var, eps)


@rule("_native_batch_norm_legit_no_training", "_batch_norm_no_update", step=_batch_norm_step)
def _batch_norm_eval(call: Call) -> Edges | None:
    _, weight, bias, mean, var, _, eps = call.args
    return _normalised(call, weight, bias, mean, var, eps)


def _normalised(
    call: Call, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float
) -> Edges | None:
    if mean is None or var is None or any(map(call.depends, (weight, bias, mean, var))):
        return None
    by = (wide(var) + eps).rsqrt()
    if weight is not None:
        by = by * wide(weight)
    return scaled(call.x, by.view(1, -1, *[1] * (call.x.ndim - 2)), call.out)


@rule("native_dropout")
def _dropout(call: Call) -> Edges | None:
    x, share, train = call.args
    kept = call.outs[1].to(wide(x).dtype)
    return scaled(x, kept / (1 - share) if train and share < 1 else kept, call.out)
