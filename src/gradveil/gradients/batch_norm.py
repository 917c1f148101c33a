"""Batch norm by the batch's own statistics, its second derivative in closed form: for autograd, not ``torch.func``.

With u the standardised input, s the inverse deviation, w the weight and ⟨·⟩ the mean over a channel, let
P v = v - ⟨v⟩ - u ⟨u v⟩. Then d u = s P dx and d s = -s² ⟨u dx⟩. The gradient w s P δ by the input is torch's own
kernel, and the derivatives of that are two more of it and few plain operations; torch's formula is forty of them.
"""

from typing import Any

import torch
from torch import Tensor


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the batch norm of x (N, C, ...) in train mode; autograd can differentiate it twice."""
    ones = x.new_ones(x.shape[1]) if weight is None else weight
    out: Tensor = _BatchNorm.apply(x, ones, torch.zeros_like(ones) if bias is None else bias, eps)
    return out


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, ...]:
        return *_Pull.apply(delta, *ctx.saved_tensors, ctx.eps), None


def _pull(delta: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, ...]:
    """Return w s P δ, and the sums of u δ and of δ."""
    found: tuple[Tensor, ...] = torch.ops.aten.native_batch_norm_backward(
        delta, x, weight, None, None, mean, scale, True, eps, [True, True, True]
    )
    return found


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, x: Tensor, weight: Tensor, mean: Tensor, scale: Tensor, eps: float
    ) -> tuple[Tensor, ...]:
        found = _pull(delta, x, weight, mean, scale, eps)
        ctx.save_for_backward(delta, x, weight, mean, scale, *found[1:])
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, a: Tensor, by_weight: Tensor, by_bias: Tensor) -> tuple[Tensor | None, ...]:
        delta, x, weight, mean, scale, sum_ud, sum_d = ctx.saved_tensors
        count, like = x.numel() // x.shape[1], [1, -1, *[1] * (x.ndim - 2)]

        def each(v: Tensor) -> Tensor:
            return v.view(like)

        by_delta, sum_ua, sum_a = _pull(a, x, weight, mean, scale, ctx.eps)
        over = [d for d in range(x.ndim) if d != 1]
        inner = (a * delta).sum(over) - (sum_a * sum_d + sum_ua * sum_ud) / count  # Σ a P δ
        unit = (x - each(mean)) * each(scale)
        slope = weight * scale / count
        turned = torch.addcmul(delta * each(by_weight - slope * sum_ua), a, each(slope * sum_ud), value=-1)
        by_x, *_ = _pull(turned, x, torch.ones_like(weight), mean, scale, ctx.eps)
        by_x = torch.addcmul(by_x, unit, each(slope * scale * inner), value=-1)
        by_delta = torch.addcmul(by_delta + each(by_bias), unit, each(by_weight))
        return by_delta, by_x, scale * inner, None, None, None
