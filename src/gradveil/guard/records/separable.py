"""Whether a step's gradient is a sum of one gradient per record, so that each can be clipped by itself."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradveil.errors import DefenseError
from gradveil.losses import Loss
from gradveil.tree import Params, add, norm, subtract
from gradveil.types import Batch


def check_separable(model: nn.Module, loss: Loss) -> None:
    """Raise where an example's gradient would depend on the others in its batch, or buffers on the data."""
    if not loss.separable:
        name = getattr(loss, "spec", None) or getattr(loss, "name", None) or loss.spec_name
        raise DefenseError(
            f"The loss {name} is not known to be a mean of one loss per example, so that no record can be clipped by "
            f"itself. Use cross_entropy without weights, bce or mse."
        )
    check_layers(model)


def check_layers(model: nn.Module) -> None:
    """Raise where a layer mixes the examples of a batch, or writes what it saw of them to its buffers."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise DefenseError(
                f"Layer {name!r} is batch norm in train mode, which mixes the examples of a batch: no record can be "
                f"clipped by itself. Use group norm, or freeze the layer by eval()."
            )
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            raise DefenseError(
                f"Layer {name!r} keeps running statistics of the data, which would leave the client beside the noise. "
                f"Build it with track_running_stats=False."
            )


def check_unmixed(model: nn.Module, batch: Batch, loss: Loss) -> Params:
    """Raise where the first two examples together give another gradient than one by one; return that of the first."""
    first = _gradient(model, batch[:1], loss)
    if len(batch) == 1:
        return first
    apart, together = add(first, _gradient(model, batch[1:2], loss)), _gradient(model, batch[:2], loss)
    if not same(together, apart) and same(first, _gradient(model, batch[:1], loss)):  # else it is chance
        raise DefenseError(
            f"In {type(model).__name__} the gradient of an example depends on the others of its batch: no record can "
            f"be clipped by itself. Use layers that look at one example at a time."
        )
    return first


def _gradient(model: nn.Module, batch: Batch, loss: Loss) -> Params:
    """Return the gradient of the sum of the losses."""
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        value = loss.each(model(batch.inputs), batch.labels).sum()
    return dict(zip(weights, torch.autograd.grad(value, list(weights.values()), materialize_grads=True), strict=True))


def same(a: Params, b: Params) -> bool:
    """Return whether two gradients are the same but for rounding; where one is not finite, nothing is known."""
    apart, on_cuda = float(norm(subtract(a, b))), any(value.is_cuda for value in b.values())
    return not apart > (0.02 if on_cuda else 1e-3) * float(norm(b)) + 1e-7  # CUDA may round to TF32
