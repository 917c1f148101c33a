"""Kinds of layers whose records' gradients follow from what they saw."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradveil.guard.records.captured import ConvolutionSeen, LinearSeen, Seen
from gradveil.guard.records.rounding import Pair, gram_of_rows, narrow


class NormSeen(Seen):
    """A normalisation's weight and bias, each a factor or a summand of the standardised input."""

    def own(self, which: str) -> Tensor:
        """Return each record's gradient."""
        layer: Any = self.layer
        part = self.delta if which == "bias" else self.delta * self.standardised().view_as(self.delta)
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
            return part.flatten(2, -1 - len(layer.normalized_shape)).sum(2) if self._positions else part
        return part.flatten(3).sum(3) if part.ndim > 3 else part

    @property
    def _positions(self) -> bool:
        return self.delta.ndim > 2 + len(self.layer.normalized_shape)  # type: ignore[arg-type]

    def standardised(self) -> Tensor:
        """Return the layer's output without weight and bias."""
        layer: Any = self.layer
        x = self.a.flatten(0, 1)
        if isinstance(layer, nn.LayerNorm):
            return F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.RMSNorm):
            return F.rms_norm(x, layer.normalized_shape, eps=layer.eps)
        if isinstance(layer, nn.GroupNorm):
            return F.group_norm(x, layer.num_groups, eps=layer.eps)
        if isinstance(layer, _BatchNorm):
            return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
        return F.instance_norm(x, layer.running_mean, layer.running_var, use_input_stats=True, eps=layer.eps)


class EmbeddingSeen(Seen):
    """Rows of a table, by number."""

    def _rows(self) -> tuple[Tensor, Tensor]:
        """Return numbers (K, N, T) and δ (K, N, T, D), zero at the padding."""
        layer: Any = self.layer
        numbers = self.a.reshape(*self.a.shape[:2], -1)
        delta = self.delta.reshape(*numbers.shape, self.delta.shape[-1])
        if layer.padding_idx is not None:
            delta = delta.masked_fill((numbers == layer.padding_idx)[..., None], 0)
        return numbers, delta

    @property
    def formed(self) -> int:
        """Positions of a gradient that is not what is summed."""
        return int(self._rows()[0].shape[2])

    def own(self, which: str) -> Tensor:
        """Return each record's gradient."""
        numbers, delta = self._rows()
        empty = delta.new_zeros(*numbers.shape[:2], *self.layer.weight.shape)  # type: ignore[misc]
        return empty.scatter_add_(2, numbers[..., None].expand_as(delta), delta)

    def lengths_of(self, which: str) -> Pair:
        """Return bounds of the square norms and masses (K, N)."""
        numbers, delta = self._rows()
        return gram_of_rows(delta, numbers[..., None] == numbers[..., None, :])

    def total(self, which: str, weights: Tensor, mass: float = 1.0) -> Tensor:
        """Return the weighted sum (K, *shape), in float64: rows that meet may be many."""
        numbers, delta = self._rows()
        delta = (delta.double() * weights[..., None, None]).flatten(1, 2)
        empty = delta.new_zeros(len(delta), *self.layer.weight.shape)  # type: ignore[misc]
        found = empty.scatter_add_(1, numbers.flatten(1)[..., None].expand_as(delta), delta)
        return narrow(found, numbers.shape[1], self.delta.dtype, mass)


KINDS: dict[type[nn.Module], type[Seen]] = {
    nn.Linear: LinearSeen,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), ConvolutionSeen),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), NormSeen),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), NormSeen),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), NormSeen),
    nn.Embedding: EmbeddingSeen,
}


def known(model: nn.Module) -> dict[nn.Module, str] | None:
    """Return the layers that hold trained parameters, with their names' prefix; None where one is of no known kind."""
    found: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if not any(p is not None and p.requires_grad for p in module._parameters.values()):
            continue
        if not is_known(module):
            return None
        found[module] = f"{name}." if name else ""
    return found


def is_known(module: nn.Module) -> bool:
    """Return whether a module is a layer whose records' gradients follow from what it saw."""
    plain = type(module) in KINDS and "forward" not in module.__dict__ and "parametrizations" not in module._modules
    if isinstance(module, nn.Embedding):
        plain = plain and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        plain = plain and (module.training or not module.track_running_stats)
    return plain
