"""Batch norm with fixed statistics, and dropout with a given mask: a scaling each."""

from dataclasses import replace

from torch import Tensor

from gradveil.representation.layers.rules.arithmetic import Scale, scaled
from gradveil.representation.layers.rules.base import Affine, Call, Edges, affine, rule, wide


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
