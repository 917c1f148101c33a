"""Gradients of single records from what each layer saw: its input a and the loss's gradient δ by its output."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gradveil.gradients.by_hand import Geometry, pair, patches
from gradveil.modules import copied_buffers, plain_attention, plain_checkpoints
from gradveil.protection.records import (
    MASS,
    Pair,
    chunked,
    gram,
    gram_of_rows,
    in_chunks,
    narrow,
    products,
    records_in_a_chunk,
    squares,
    sum_of_held,
    wide,
)
from gradveil.tree import Params

CACHED = 2**20  # numbers of patches that are made at once on a CPU


@dataclass
class LayerRecord(ABC):
    """What one layer saw."""

    layer: nn.Module
    prefix: str  # of its parameters' names
    a: Tensor  # (K, N, ...) its input; in float32 at least, as all that is made of it
    delta: Tensor  # (K, N, ...)

    def __post_init__(self) -> None:
        self.a = wide(self.a) if self.a.is_floating_point() else self.a
        self.delta = wide(self.delta)

    @abstractmethod
    def own(self, which: str) -> Tensor:
        """Return each record's gradient of the parameter (K, N, ...), its numbers in an order of the layer's own."""

    def ordered(self, which: str, numbers: Tensor) -> Tensor:
        """Return numbers (..., *those of a gradient) in the order and shape of the parameter."""
        return numbers

    def rows(self, which: str, directions: Tensor) -> Tensor:
        """Return tensors of the parameter's shape (R, *shape) as rows of numbers in the layer's order."""
        return directions.flatten(1)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        return tuple(n for n, p in self.layer._parameters.items() if p is not None and p.requires_grad)

    def lengths_of(self, which: str) -> Pair:
        """Return upper bounds of the square norms and of the square masses (K, N) of one parameter's gradients.

        A gradient that is held has no more mass than length.
        """
        found = squares(self.held(which), 2)
        return found, found

    def held(self, which: str) -> Tensor:
        kept: dict[str, Tensor] = self.__dict__.setdefault("_kept", {})
        if which not in kept:
            kept[which] = self.own(which)
        return kept[which]

    @property
    def formed(self) -> int:
        """Positions of a gradient that is not what is summed, where ``along`` forms it all the same; 0: none."""
        return 0

    def total(self, which: str, weights: Tensor, mass: float = 1.0) -> Tensor:
        """Return the weighted sum of one parameter's gradients (K, *shape), in float32 at least.

        ``mass``: the most that a record's weighted gradient may be long, in clips.
        """
        each = self.held(which)
        return self.ordered(which, sum_of_held(each, weights, mass))

    def each(self, which: str) -> Tensor:
        """Return each record's gradient (K, N, *shape)."""
        return self.ordered(which, self.held(which))

    def along(self, which: str, directions: Tensor) -> Tensor:
        """Return the inner products (K, N, R) with directions (R, *shape)."""
        return products(self.held(which).flatten(2), self.rows(which, directions))

    def part(self, some: slice) -> "LayerRecord":
        return type(self)(self.layer, self.prefix, self.a[some], self.delta[some])

    def dealt(self, clients: int) -> "LayerRecord":
        """Return the records of each client as those of so many clients."""
        a, delta = (v.unflatten(1, (clients, -1)).flatten(0, 1) for v in (self.a, self.delta))
        return type(self)(self.layer, self.prefix, a, delta)

    def without(self, left_out: Tensor) -> "LayerRecord":
        """Return what the layer saw, with zeros for the records of a mask (K, N), whatever these held."""

        def kept(values: Tensor) -> Tensor:
            return values.masked_fill(left_out.view(*left_out.shape, *[1] * (values.ndim - 2)), 0)

        return type(self)(self.layer, self.prefix, kept(self.a), kept(self.delta))


class Weighted(LayerRecord):
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
        if which == "bias":
            return self.deltas().sum(3).flatten(2)
        return (self.deltas().mT @ self.inputs()).flatten(2, 3)

    def ordered(self, which: str, numbers: Tensor) -> Tensor:
        shape = self.layer._parameters[which].shape  # type: ignore[union-attr]
        return numbers.reshape(*numbers.shape[: numbers.ndim - min(len(shape), 2)], *shape)

    @property
    def formed(self) -> int:
        return int(self.deltas().shape[3]) if self.ghost else 0

    def lengths_of(self, which: str) -> Pair:
        if which == "bias" or not self.ghost:
            return super().lengths_of(which)
        a, delta = self.inputs(), self.deltas()
        if a.shape[3] == 1:
            found = (squares(a, 3) * squares(delta, 3)).sum(2)
            return found, found
        norms, masses = gram(a, delta)
        return norms, masses

    def total(self, which: str, weights: Tensor, mass: float = 1.0) -> Tensor:
        if which == "bias" or not self.ghost:
            return super().total(which, weights, mass)
        positions = self.deltas().shape[3]
        size = records_in_a_chunk(positions, mass if positions == 1 else max(mass, MASS), self.delta.dtype)
        dtype = self.delta.dtype if size else torch.float64
        numbers = self.layer.weight.numel()  # type: ignore[operator]

        def part(some: slice, size: int) -> Tensor:
            return self.chunks(some, size, weights[:, some].to(dtype))

        return in_chunks(self.a.shape[1], max(size, 1), numbers, self.delta, part, mass)

    def chunks(self, some: slice, size: int, weights: Tensor) -> Tensor:
        seen = self if some == slice(0, self.a.shape[1]) else self.of_records(some)
        delta = seen.deltas().to(weights) * weights[:, :, None, None, None]
        a, delta = (chunked(rows, size).transpose(2, 3).flatten(3, 4) for rows in (seen.inputs().to(delta), delta))
        return self.ordered("weight", (delta.mT @ a).flatten(2, 3))

    def of_records(self, some: slice) -> "Weighted":
        return type(self)(self.layer, self.prefix, self.a[:, some], self.delta[:, some])


class LinearRecord(Weighted):
    """A fully connected layer."""

    def inputs(self) -> Tensor:
        return self.a.flatten(2, -2)[:, :, None] if self.a.ndim > 3 else self.a[:, :, None, None]

    def deltas(self) -> Tensor:
        return self.delta.flatten(2, -2)[:, :, None] if self.delta.ndim > 3 else self.delta[:, :, None, None]


class ConvolutionRecord(Weighted):
    """A convolution in one or two dimensions: its positions are the output's pixels, its inputs their patches."""

    @cached_property
    def by_pixel(self) -> bool:
        """Whether a patch is copied pixel by pixel, its channels side by side, which is the fastest."""
        layer: Any = self.layer
        return isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.dilation == (1, 1)

    def _padded(self) -> Tensor:
        layer: Any = self.layer
        x, sides = self.a.flatten(0, 1), layer._reversed_padding_repeated_twice
        if layer.padding_mode == "zeros":
            return F.pad(x, sides) if any(sides) else x
        return F.pad(x, sides, mode=layer.padding_mode)

    def inputs(self) -> Tensor:
        layer: Any = self.layer
        x = self._padded()
        if self.by_pixel:
            geometry = Geometry(pair(layer.kernel_size), pair(layer.stride), (0, 0))
            return patches(x[:, None], geometry).view(*self.a.shape[:2], 1, -1, layer.weight[0].numel())
        x = x if x.ndim == 4 else x[:, :, None]
        kernel, dilation, stride = ((1, *s)[-2:] for s in (layer.kernel_size, layer.dilation, layer.stride))
        columns: Tensor = F.unfold(x, kernel, dilation, 0, stride)  # (K N, C kernel, T)
        return columns.view(*self.a.shape[:2], layer.groups, -1, columns.shape[2]).mT

    def own(self, which: str) -> Tensor:
        layer: Any = self.layer
        each = self.delta[0, 0, 0].numel() * layer.weight[0].numel()
        some = max(1, CACHED // each)
        if which == "bias" or len(self.a) > 1 or self.a.is_cuda or self.a.shape[1] <= some:
            return super().own(which)
        parts = zip(self.a.split(some, 1), self.delta.split(some, 1), strict=True)
        return torch.cat([type(self)(layer, self.prefix, a, d).own(which) for a, d in parts], 1)

    def ordered(self, which: str, numbers: Tensor) -> Tensor:
        layer: Any = self.layer
        if which == "bias" or not self.by_pixel:
            return super().ordered(which, numbers)
        found: Tensor = numbers.unflatten(-1, (*layer.kernel_size, -1))
        return found.movedim(-1, -3)

    def rows(self, which: str, directions: Tensor) -> Tensor:
        if which == "bias" or not self.by_pixel:
            return super().rows(which, directions)
        return directions.movedim(2, -1).flatten(1)

    def deltas(self) -> Tensor:
        layer: Any = self.layer
        rows: Tensor = self.delta.flatten(3).unflatten(2, (layer.groups, -1))
        return rows.mT

    def chunks(self, some: slice, size: int, weights: Tensor) -> Tensor:
        layer: Any = self.layer
        plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str) and not self.delta.is_cuda
        if not plain or len(self.a) > 1 or self.a.ndim != 5 or size < len(weights[0]) or weights.dtype != self.a.dtype:
            return super().chunks(some, size, weights)
        settings = (layer.stride, layer.padding, layer.dilation, layer.groups)
        delta = self.delta[0, some] * weights[0][:, None, None, None]
        found: Tensor = conv2d_weight(self.a[0, some], layer.weight.shape, delta, *settings)
        return found[None, None]


class NormRecord(LayerRecord):
    """A normalisation's weight and bias, each a factor or a summand of the standardised input."""

    def own(self, which: str) -> Tensor:
        layer: Any = self.layer
        part = self.delta if which == "bias" else self.delta * self.standardised().view_as(self.delta)
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
            return part.flatten(2, -1 - len(layer.normalized_shape)).sum(2) if self._positions else part
        return part.flatten(3).sum(3) if part.ndim > 3 else part

    @property
    def _positions(self) -> bool:
        return self.delta.ndim > 2 + len(self.layer.normalized_shape)  # type: ignore[arg-type]

    def standardised(self) -> Tensor:
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


class EmbeddingRecord(LayerRecord):
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
        return int(self._rows()[0].shape[2])

    def own(self, which: str) -> Tensor:
        numbers, delta = self._rows()
        empty = delta.new_zeros(*numbers.shape[:2], *self.layer.weight.shape)  # type: ignore[misc]
        return empty.scatter_add_(2, numbers[..., None].expand_as(delta), delta)

    def lengths_of(self, which: str) -> Pair:
        numbers, delta = self._rows()
        return gram_of_rows(delta, numbers[..., None] == numbers[..., None, :])

    def total(self, which: str, weights: Tensor, mass: float = 1.0) -> Tensor:
        numbers, delta = self._rows()
        delta = (delta.double() * weights[..., None, None]).flatten(1, 2)
        empty = delta.new_zeros(len(delta), *self.layer.weight.shape)  # type: ignore[misc]
        found = empty.scatter_add_(1, numbers.flatten(1)[..., None].expand_as(delta), delta)
        return narrow(found, numbers.shape[1], self.delta.dtype, mass)


KINDS: dict[type[nn.Module], type[LayerRecord]] = {
    nn.Linear: LinearRecord,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d), ConvolutionRecord),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), NormRecord),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), NormRecord),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), NormRecord),
    nn.Embedding: EmbeddingRecord,
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
    plain = plain and module._parameters.keys() <= {"weight", "bias"}  # not those that a hook makes its weight of
    if isinstance(module, nn.Embedding):
        plain = plain and module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        plain = plain and (module.training or not module.track_running_stats)
    return plain


def for_each(gradient: Callable[..., Params], *rows: Tensor, **settings: Any) -> Params:
    """Return the gradients of all rows: at once, or one by one where a layer does not bear that."""
    with plain_attention(), plain_checkpoints(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # where torch takes one by one itself
        try:
            found: Params = vmap(gradient, **settings)(*rows)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            alone = [gradient(*row) for row in zip(*rows, strict=True)]
            found = {n: torch.stack([g[n] for g in alone]) for n in alone[0]}
    return found


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among arguments, or in what a layer gave."""
    if isinstance(tree, Tensor):  # as most layers give it
        return [tree]
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


@dataclass
class ModuleRecord(LayerRecord):
    """A module of no known kind, with all that is inside it."""

    given: Any = field(kw_only=True)  # the arguments it got, by place and by name
    deltas: dict[int, Tensor] = field(kw_only=True)  # by place among the tensors that it gave

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(n for n, p in self.layer.named_parameters() if p.requires_grad)

    def own(self, which: str) -> Tensor:
        kept: Params = self.__dict__.setdefault("_kept", {})
        kept.update({n: wide(g.detach())[None] for n, g in self._gradients().items()})
        return kept[which]

    def _gradients(self) -> Params:
        weights = {n: self.layer.get_parameter(n).detach() for n in self.trained}
        fixed = {n: p.detach() for n, p in self.layer.named_parameters() if n not in weights}
        leaves, tree = tree_flatten(self.given)
        count = self.delta.shape[1]
        rows = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.shape[:1] == (count,)}

        def gradient(*both: Tensor) -> Params:
            deltas, mine = both[: len(self.deltas)], dict(zip(rows, both[len(self.deltas) :], strict=True))
            args, kwargs = tree_unflatten([mine[i][None] if i in mine else t for i, t in enumerate(leaves)], tree)
            state = fixed | copied_buffers(self.layer)

            def outputs(w: Params) -> tuple[Tensor, ...]:
                gave = tensors_of(functional_call(self.layer, state | w, args, kwargs))
                return tuple(gave[i][0] for i in self.deltas)

            made, back, *_ = vjp(outputs, weights)
            found: Params = back(tuple(d.to(out) for d, out in zip(deltas, made, strict=True)))[0]
            return found

        return for_each(gradient, *self.deltas.values(), *rows.values())

    def without(self, left_out: Tensor) -> LayerRecord:
        other, kept = copy.copy(self), {}
        for which in self.trained:
            each = self.held(which)
            kept[which] = each.masked_fill(left_out.view(*left_out.shape, *[1] * (each.ndim - 2)), 0)
        other.__dict__["_kept"] = kept
        return other
