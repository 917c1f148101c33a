"""Gradients of records from what each layer saw: its input a and the loss's gradient δ by its output.

A layer that is linear in its weight has the gradient Σ_t δ_t a_tᵀ for a record with positions t (pixels, words), so
that its norm needs no gradient at all where there is one position, ||a||² ||δ||², or few: Σ_st (a_s·a_t)(δ_s·δ_t)
(ghost norms). A weighted sum over records is the usual weight gradient with weighted δ. All tensors have two leading
dimensions: (K clients, N records).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm


def wide(values: Tensor) -> Tensor:
    """Return numbers in float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sum_of(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of one shape, in float32 at least."""
    return torch.stack([wide(term) for term in terms]).sum(0)


@dataclass
class Seen(ABC):
    """What one layer saw."""

    layer: nn.Module
    prefix: str  # of its parameters' names
    a: Tensor  # (K, N, ...) its input
    delta: Tensor  # (K, N, ...)

    @abstractmethod
    def own(self, which: str) -> Tensor:
        """Return each record's gradient of the parameter (K, N, *shape)."""

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The layer's parameters that are trained."""
        return tuple(n for n, p in self.layer._parameters.items() if p is not None and p.requires_grad)

    def square_norms(self) -> Tensor:
        """Return the square norms (K, N)."""
        return sum_of([self.norms_of(which) for which in self.trained])

    def norms_of(self, which: str) -> Tensor:
        """Return the square norms (K, N) of one parameter's gradients."""
        return self.held(which).flatten(2).square().sum(2)

    def held(self, which: str) -> Tensor:
        """Return each record's gradient, computed once."""
        kept: dict[str, Tensor] = self.__dict__.setdefault("_kept", {})
        if which not in kept:
            kept[which] = self.own(which)
        return kept[which]

    def total(self, which: str, weights: Tensor) -> Tensor:
        """Return the weighted sum of one parameter's gradients (K, *shape) for weights (K, N)."""
        each = self.held(which)
        return torch.bmm(weights[:, None], each.flatten(2)).view(len(each), *each.shape[2:])

    def along(self, which: str, directions: Tensor) -> Tensor:
        """Return the inner products (K, N, R) with directions (R, *shape)."""
        return self.held(which).flatten(2) @ directions.flatten(1).T

    def part(self, some: slice) -> "Seen":
        """Return what some clients saw."""
        return type(self)(self.layer, self.prefix, self.a[some], self.delta[some])

    def without(self, left_out: Tensor) -> "Seen":
        """Return what the layer saw, with zeros for the records of a mask (K, N), whatever these held."""

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(left_out.view(*left_out.shape, *[1] * (values.ndim - 2)), 0)

        return type(self)(self.layer, self.prefix, kept(self.a), kept(self.delta))


class Weighted(Seen):
    """A layer that is linear in its weight: rows of inputs (K, N, G, T, I) and of δ (K, N, G, T, O), in G groups."""

    @abstractmethod
    def inputs(self) -> Tensor:
        """Return the rows of inputs."""

    @abstractmethod
    def deltas(self) -> Tensor:
        """Return the rows of δ."""

    @property
    def ghost(self) -> bool:
        """Whether products of positions take less work than the gradient itself."""
        weight = self.layer.weight
        rows = self.deltas()
        groups, positions, outputs = rows.shape[2:]
        inputs = weight.numel() // (groups * outputs)  # type: ignore[operator]
        return positions * (inputs + outputs) < inputs * outputs or positions == 1

    def own(self, which: str) -> Tensor:
        """Return each record's gradient."""
        if which == "bias":
            return self.deltas().sum(3).flatten(2)
        shape = self.layer.weight.shape
        return (self.deltas().mT @ self.inputs()).reshape(*self.delta.shape[:2], *shape)  # type: ignore[misc]

    def norms_of(self, which: str) -> Tensor:
        """Return the square norms (K, N) of one parameter's gradients."""
        if which == "bias" or not self.ghost:
            return super().norms_of(which)
        a, delta = self.inputs(), self.deltas()
        if a.shape[3] == 1:
            return (a.square().sum((3, 4)) * delta.square().sum((3, 4))).sum(2)
        return ((a @ a.mT) * (delta @ delta.mT)).sum((2, 3, 4))

    def total(self, which: str, weights: Tensor) -> Tensor:
        """Return the weighted sum of one parameter's gradients (K, *shape)."""
        if which == "bias" or not self.ghost:
            return super().total(which, weights)
        a, delta = self.inputs(), self.deltas() * weights[:, :, None, None, None]
        a, delta = (rows.transpose(1, 2).flatten(2, 3) for rows in (a, delta))  # (K, G, N T, ...)
        return (delta.mT @ a).reshape(len(a), *self.layer.weight.shape)  # type: ignore[misc]


class LinearSeen(Weighted):
    """A fully connected layer."""

    def inputs(self) -> Tensor:
        """Return the rows of inputs."""
        return self.a.flatten(2, -2)[:, :, None] if self.a.ndim > 3 else self.a[:, :, None, None]

    def deltas(self) -> Tensor:
        """Return the rows of δ."""
        return self.delta.flatten(2, -2)[:, :, None] if self.delta.ndim > 3 else self.delta[:, :, None, None]


class ConvolutionSeen(Weighted):
    """A convolution in one or two dimensions: its positions are the output's pixels, its inputs their patches."""

    def inputs(self) -> Tensor:
        """Return the patches."""
        layer: Any = self.layer
        x = self.a.flatten(0, 1)
        two = lambda setting: setting if len(setting) == 2 else (1, *setting)  # noqa: E731
        padding: Any = (0, 0)
        if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
            padding = layer.padding if len(layer.padding) == 2 else (0, *layer.padding)
        else:
            mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
            x = F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)
        x = x if x.ndim == 4 else x[:, :, None]
        dilation, stride = two(layer.dilation), two(layer.stride)
        columns: Tensor = F.unfold(x, two(layer.kernel_size), dilation, padding, stride)  # (K N, C kernel, T)
        return columns.view(*self.a.shape[:2], layer.groups, -1, columns.shape[2]).mT

    def deltas(self) -> Tensor:
        """Return δ by position."""
        layer: Any = self.layer
        rows: Tensor = self.delta.flatten(3).unflatten(2, (layer.groups, -1))
        return rows.mT

    def total(self, which: str, weights: Tensor) -> Tensor:
        """Return the weighted sum; of one client by torch's own convolution."""
        layer: Any = self.layer
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
        if which == "bias" or not self.ghost or len(self.a) > 1 or not plain or self.a.ndim != 5:
            return super().total(which, weights)
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        delta = self.delta[0] * weights[0][:, None, None, None]
        found: Tensor = conv2d_weight(self.a[0], layer.weight.shape, delta, *settings)
        return found[None]


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
        numbers, delta = self.a.flatten(2), self.delta.flatten(2, -2)
        if layer.padding_idx is not None:
            delta = delta * (numbers != layer.padding_idx)[..., None]
        return numbers, delta

    def own(self, which: str) -> Tensor:
        """Return each record's gradient."""
        numbers, delta = self._rows()
        empty = delta.new_zeros(*numbers.shape[:2], *self.layer.weight.shape)  # type: ignore[misc]
        return empty.scatter_add_(2, numbers[..., None].expand_as(delta), delta)

    def norms_of(self, which: str) -> Tensor:
        """Return the square norms (K, N)."""
        numbers, delta = self._rows()
        same = numbers[..., None] == numbers[..., None, :]
        return ((delta @ delta.mT) * same).sum((2, 3))

    def total(self, which: str, weights: Tensor) -> Tensor:
        """Return the weighted sum (K, *shape)."""
        numbers, delta = self._rows()
        delta = (delta * weights[..., None, None]).flatten(1, 2)
        empty = delta.new_zeros(len(delta), *self.layer.weight.shape)  # type: ignore[misc]
        return empty.scatter_add_(1, numbers.flatten(1)[..., None].expand_as(delta), delta)


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
