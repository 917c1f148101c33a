"""Read the part of a model before a layer as a chain of known steps, whatever its modules are called.

The forward pass is run once on an example and the operations it performs are written down; those that lie
between the input and the layer must form one chain of linear maps, poolings and activations.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from gradveil.certificates.bounds.recorder import OperationRecorder, read
from gradveil.certificates.bounds.stages import Activation, Affine, Conv, Dense, Reshape, Scale, Shape, Stage
from gradveil.layers.modules import find_layer, prefix


@dataclass(frozen=True)
class StepChain:
    """f: x -> r as a list of steps, in float64, with the model in eval mode."""

    stages: tuple[Stage, ...]
    in_shape: Shape
    layer: str
    has_modes: bool  # whether the model has layers that differ between training and eval

    def __call__(self, x: Tensor) -> Tensor:
        """Return r (N, L) for x (N, *in_shape)."""
        x = x.to(torch.float64)
        for stage in self.stages:
            x = stage(x)
        return x.flatten(1)

    @property
    def out_size(self) -> int:
        """The length L of the representation."""
        return self.stages[-1].out_size if self.stages else prod(self.in_shape)

    def __str__(self) -> str:
        return " -> ".join(_label(s) for s in self.stages if not isinstance(s, Reshape)) or "identity"


def _label(stage: Stage) -> str:
    return stage.curve.name if isinstance(stage, Activation) else type(stage).__name__.lower()


def walk(model: nn.Module, layer: str | None, x: Tensor) -> StepChain:
    """Return the chain before ``layer`` for inputs like x (N, *shape)."""
    name = find_layer(model, layer)
    twin = copy.deepcopy(model).to(torch.float64).eval()
    example = x[:1].detach().to(torch.float64).repeat(2, *[1] * (x.ndim - 1))
    with torch.no_grad(), OperationRecorder(example) as recorder:
        r = prefix(twin, name)(example)
    stages = [stage for node in recorder.path(r) for stage in read(node)]
    return StepChain(tuple(_fold(stages)), tuple(x.shape[1:]), name, has_modes(model))


def has_modes(model: nn.Module) -> bool:
    """Return whether the model has layers that differ between training and eval."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return any(isinstance(m, kinds) for m in model.modules())


def _fold(stages: Sequence[Stage]) -> list[Stage]:
    """Join each diagonal map with the linear map beside it, so that its norm is not counted apart."""
    found: list[Stage] = []
    for stage in stages:
        joined = _join(found[-1], stage) if found else None
        if joined is None:
            found.append(stage)
        else:
            found[-1] = joined
    return found


def _join(a: Stage, b: Stage) -> Stage | None:
    if not isinstance(a, Affine) or not isinstance(b, Affine):
        return None
    if isinstance(b, Scale):
        factor = _per_channel(b.factor, b.in_shape, isinstance(a, Conv))
        offset = a.offset * b.factor + b.offset
        if isinstance(a, Scale):
            return replace(a, factor=a.factor * b.factor, offset=offset)
        if factor is not None and isinstance(a, Conv | Dense):
            return replace(a, weight=a.weight * factor.reshape(-1, *[1] * (a.weight.ndim - 1)), offset=offset)
        return None
    if not isinstance(a, Scale) or not isinstance(b, Conv | Dense):
        return None
    factor = _per_channel(a.factor, a.in_shape, isinstance(b, Conv))
    if factor is None or (isinstance(b, Conv) and b.groups > 1):
        return None
    inner = b.linear(a.offset.expand(a.out_shape).unsqueeze(0))[0]
    weight = b.weight * factor.reshape(1, -1, *[1] * (b.weight.ndim - 2))
    return replace(b, weight=weight, offset=inner + b.offset)


def _per_channel(factor: Tensor, shape: Shape, conv: bool) -> Tensor | None:
    """Return one factor per channel (first dimension) or per feature (last one); None where it varies otherwise."""
    full = factor.expand(shape)
    if not conv:
        return full if len(shape) == 1 else None
    flat = full.reshape(shape[0], -1)
    return flat[:, 0] if bool((flat == flat[:, :1]).all()) else None
