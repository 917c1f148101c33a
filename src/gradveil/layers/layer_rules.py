"""Which linear map belongs to which operation of a forward pass: activations, convolutions, pooling, normalisation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradveil.layers.convolution import Convolution
from gradveil.layers.operators import wide
from gradveil.layers.pooling import AdaptiveAverage, Average, Choose
from gradveil.layers.rules import Call, Edges, rule, scaled

aten = torch.ops.aten


def sigmoid_slopes(y: Tensor) -> Tensor:
    """Return y (1 - y)."""
    y = wide(y)
    return torch.addcmul(y, y, y, value=-1)


def relu_slopes(y: Tensor) -> Tensor:
    """Return 1 where the unit is on, else 0."""
    return (y > 0).to(wide(y).dtype)


@rule("sigmoid")
def _sigmoid(call: Call) -> Edges | None:
    return scaled(call.x, sigmoid_slopes(call.out), call.out)


@rule("tanh")
def _tanh(call: Call) -> Edges | None:
    return scaled(call.x, 1 - wide(call.out).square(), call.out)


@rule("relu")
def _relu(call: Call) -> Edges | None:
    return scaled(call.x, relu_slopes(call.out), call.out)


def _slopes(call: Call, backward: Any, *settings: Any) -> Edges | None:
    """Return the edge whose slopes torch's own backward of that activation gives."""
    value = wide(call.x)
    return scaled(call.x, backward(torch.ones_like(value), value, *settings), call.out)


@rule("leaky_relu")
def _leaky_relu(call: Call) -> Edges | None:
    return _slopes(call, aten.leaky_relu_backward, call.arg(1, "negative_slope", 0.01), False)


@rule("elu")
def _elu(call: Call) -> Edges | None:
    return _elu_slopes(call, call.arg(1, "alpha", 1), call.arg(2, "scale", 1), call.arg(3, "input_scale", 1))


@rule("celu")
def _celu(call: Call) -> Edges | None:
    alpha = call.arg(1, "alpha", 1.0)
    return _elu_slopes(call, alpha, 1, 1 / alpha)


@rule("selu")
def _selu(call: Call) -> Edges | None:
    return _elu_slopes(call, 1.6732632423543772, 1.0507009873554805, 1)  # Klambauer et al. 2017, equation 14


def _elu_slopes(call: Call, *settings: float) -> Edges | None:
    return _slopes(call, lambda ones, x: aten.elu_backward(ones, *settings, False, x))


@rule("softplus")
def _softplus(call: Call) -> Edges | None:
    return _slopes(call, aten.softplus_backward, call.arg(1, "beta", 1), call.arg(2, "threshold", 20))


@rule("hardtanh")
def _hardtanh(call: Call) -> Edges | None:
    return _slopes(call, aten.hardtanh_backward, call.arg(1, "min_val", -1), call.arg(2, "max_val", 1))


@rule("gelu")
def _gelu(call: Call) -> Edges | None:
    kind = call.kwargs.get("approximate", "none")
    return _slopes(call, lambda ones, x: aten.gelu_backward(ones, x, approximate=kind))


@rule("silu")
def _silu(call: Call) -> Edges | None:
    return _slopes(call, aten.silu_backward)


@rule("mish")
def _mish(call: Call) -> Edges | None:
    return _slopes(call, aten.mish_backward)


@rule("hardswish")
def _hardswish(call: Call) -> Edges | None:
    return _slopes(call, aten.hardswish_backward)


@rule("hardsigmoid")
def _hardsigmoid(call: Call) -> Edges | None:
    return _slopes(call, aten.hardsigmoid_backward)


@rule("convolution")
def _convolution(call: Call) -> Edges | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if transposed or call.depends(weight) or call.depends(bias) or x.ndim != weight.ndim:
        return None
    stride, padding, dilation = (_full(s, weight.ndim - 2) for s in (stride, padding, dilation))
    shapes = tuple(x.shape), tuple(call.out.shape)
    return [(x, Convolution(wide(weight.detach()), stride, padding, dilation, groups, *shapes))]


def _full(setting: Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(setting) * ndim if len(setting) == 1 else tuple(setting)


@rule("max_pool2d_with_indices")
def _max_pool(call: Call) -> Edges | None:
    kernel = call.arg(1, "kernel_size", None)
    stride = call.arg(2, "stride", None) or kernel
    settings = (kernel, stride, call.arg(3, "padding", [0]), call.arg(4, "dilation", [1]))
    window = tuple(n for s in settings for n in _full([s] if isinstance(s, int) else s, 2))
    return [(call.x, Choose(call.outs[1], tuple(call.x.shape), window))] if call.x.ndim == 4 else None


@rule("max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _other_max_pool(call: Call) -> Edges | None:
    batched = call.x.ndim == (4 if call.outs[1].ndim == 4 else 5)
    return [(call.x, Choose(call.outs[1], tuple(call.x.shape)))] if batched else None


@rule("avg_pool2d")
def _avg_pool(call: Call) -> Edges | None:
    if call.kwargs or call.x.ndim != 4:
        return None
    return [(call.x, Average(tuple(call.args[1:]), tuple(call.x.shape)))]


@rule("_adaptive_avg_pool2d")
def _adaptive_avg_pool(call: Call) -> Edges | None:
    if call.x.ndim != 4:
        return None
    return [(call.x, AdaptiveAverage(tuple(call.args[1]), tuple(call.x.shape)))]


@rule("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
def _batch_norm(call: Call) -> Edges | None:
    _, weight, _, mean, var, training, _, eps = call.args
    return None if training else _normalised(call, weight, mean, var, eps)


@rule("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def _batch_norm_eval(call: Call) -> Edges | None:
    _, weight, _, mean, var, _, eps = call.args
    return _normalised(call, weight, mean, var, eps)


def _normalised(call: Call, weight: Tensor | None, mean: Tensor | None, var: Tensor | None, eps: float) -> Edges | None:
    if mean is None or var is None or any(map(call.depends, (weight, mean, var))):
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
