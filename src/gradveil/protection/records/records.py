"""Gradients of single records: what can be asked of them, their clipped sum, and the fastest way to each."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gradveil.errors import DefenseError
from gradveil.gradients.functional import full_precision, quiet
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.losses import build as build_loss
from gradveil.modules import copied_buffers, plain_attention, plain_checkpoints, ways_into
from gradveil.protection.records.layers import KINDS, LayerRecord, known
from gradveil.protection.records.rounding import (
    MAPPED,
    Pair,
    clip_factors,
    narrow,
    products,
    squares,
    sum_of_held,
    wide,
)
from gradveil.tree import Params, add, norm, subtract
from gradveil.types import Batch

if TYPE_CHECKING:
    from gradveil.protection.records.coordinates import Coordinates


class Records(ABC):
    """Gradients g_j of N records."""

    count: int
    like: Params  # the trained parameters, of which names, order, shapes and types count

    @abstractmethod
    def square_norms(self) -> Tensor:
        """Return upper bounds of each ||g_j||² (N,) in float64, as near as rounding lets them be."""

    def square_masses(self) -> Tensor:
        """Return upper bounds of what cancels in each g_j, squared (N,): where nothing does, norms (``rounding``)."""
        return self.square_norms()

    @property
    def formed(self) -> int:
        """Positions of gradients that ``along`` forms and ``weighted_sum`` does not; 0: none."""
        return 0

    @abstractmethod
    def along(self, directions: Params) -> Tensor:
        """Return the inner products (N, R) with directions (R, *shape) by name, in float64."""

    @abstractmethod
    def each(self) -> Params:
        """Return the gradients themselves (N, *shape) by name."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j, in float32 at least; a record of weight 0 never counts, even where it is not finite.

        ``mass``: the most that one w_j g_j may be long, in clips; the sum is off by less than ``rounding`` says.
        """

    def pieces(self) -> Iterator[tuple["Records", slice]]:
        """Yield the records as they are held at once, and which of all they are."""
        yield self, slice(None)


@dataclass(frozen=True)
class Held(Records):
    """Gradients that lie side by side: (N, *shape) by name."""

    gradients: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(next(iter(self.gradients.values())))

    @property
    def like(self) -> Params:  # type: ignore[override]
        return {n: g.new_empty(g.shape[1:]) for n, g in self.gradients.items()}

    def square_norms(self) -> Tensor:
        return torch.stack([squares(g, 1) for g in self.gradients.values()]).sum(0)

    def along(self, directions: Params) -> Tensor:
        found = [products(g.flatten(1), directions[n].flatten(1)) for n, g in self.gradients.items()]
        return torch.stack(found).sum(0)

    def each(self) -> Params:
        return self.gradients

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        kept, found = weights != 0, self.gradients
        if not bool(kept.all()):  # in its place: where the others are summed must not hang on it
            found = {n: g.masked_fill(~kept.view(-1, *[1] * (g.ndim - 1)), 0) for n, g in found.items()}
        return {n: sum_of_held(wide(g)[None], weights[None], mass)[0] for n, g in found.items()}


@dataclass(frozen=True)
class InParts(Records):
    """Gradients of some records after the others: computed anew for every question."""

    parts: Sequence[Callable[[], Held]]
    sizes: Sequence[int]
    like: Params

    @property
    def count(self) -> int:  # type: ignore[override]
        return sum(self.sizes)

    def square_norms(self) -> Tensor:
        return torch.cat([part().square_norms() for part in self.parts])

    def along(self, directions: Params) -> Tensor:
        return torch.cat([part().along(directions) for part in self.parts])

    def each(self) -> Params:
        found = [part().gradients for part in self.parts]
        return {n: torch.cat([some[n] for some in found]) for n in found[0]}

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        total: Params = {}
        for part, some in self.pieces():
            found = part.weighted_sum(weights[some], mass)
            total = {n: g.double() + total[n] if total else g.double() for n, g in found.items()}
        return total

    def pieces(self) -> Iterator[tuple[Records, slice]]:
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            yield part(), slice(start, start + size)
            start += size


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
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        value = loss.each(model(batch.inputs), batch.labels).sum()
    return dict(zip(weights, torch.autograd.grad(value, list(weights.values()), materialize_grads=True), strict=True))


def same(a: Params, b: Params) -> bool:
    """Return whether two gradients are the same but for rounding; where one is not finite, nothing is known."""
    apart, on_cuda = float(norm(subtract(a, b))), any(value.is_cuda for value in b.values())
    return not apart > (0.02 if on_cuda else 1e-3) * float(norm(b)) + 1e-7  # CUDA may round to TF32


HELD = 2**28  # bytes of gradients that are held at once; beyond, they are computed again when they are needed again


@dataclass
class Captured(Records):
    """Gradients by what the layers saw: of N records, or of (K, N) where the model's weights are those of K clients."""

    layers: list[LayerRecord]
    like: Params  # the trained parameters, in order
    shape: tuple[int, ...]  # (N,) or (K, N)

    @property
    def count(self) -> int:  # type: ignore[override]
        return self.shape[-1]

    @cached_property
    def _lengths(self) -> Pair:
        each = [layer.lengths_of(which) for layer in self.layers for which in layer.trained]
        norms = torch.stack([norm for norm, _ in each]).sum(0)  # (K, N)
        if all(norm is mass for norm, mass in each):
            return norms, norms
        return norms, torch.stack([mass for _, mass in each]).sum(0)

    @property
    def _lead(self) -> torch.Size:
        return self.layers[0].delta.shape[:2]

    def square_norms(self) -> Tensor:
        return self._lengths[0].view(self.shape)

    def square_masses(self) -> Tensor:
        return self._lengths[1].view(self.shape)

    @cached_property
    def formed(self) -> int:
        return max(layer.formed for layer in self.layers)

    def along(self, directions: Params) -> Tensor:
        found = [
            layer.along(which, directions[layer.prefix + which].to(layer.delta))
            for layer in self.layers
            for which in layer.trained
        ]
        return torch.stack(found).sum(0).reshape(*self.shape, -1)

    def each(self) -> Params:
        found = {layer.prefix + w: layer.each(w) for layer in self.layers for w in layer.trained}
        empty = self.layers[0].delta.new_zeros(())
        return {
            n: found.get(n, empty).expand(*self._lead, *p.shape).reshape(*self.shape, *p.shape)
            for n, p in self.like.items()
        }

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        factors, bad = weights.view(self._lead), ~self._lengths[1].isfinite()
        layers = [layer.without(bad & (factors == 0)) for layer in self.layers] if bool(bad.any()) else self.layers
        found = {layer.prefix + w: layer.total(w, factors, mass) for layer in layers for w in layer.trained}
        lead = self.shape[:-1]
        return {
            n: found[n].reshape(*lead, *p.shape) if n in found else wide(p.new_zeros(*lead, *p.shape))
            for n, p in self.like.items()
        }

    def dealt(self, clients: int) -> "Captured":
        layers = [layer.dealt(clients) for layer in self.layers]
        return Captured(layers, self.like, (self.shape[0] * clients, self.shape[1] // clients))

    def clients(self, some: slice) -> "Captured":
        count = len(range(*some.indices(self.shape[0])))
        return Captured([layer.part(some) for layer in self.layers], self.like, (count, *self.shape[1:]))


def records_of(model: nn.Module, batch: Batch, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> Records:
    """Return the gradients of each record's loss at the model's weights, by the fastest way that fits.

    That is by what each layer saw, where all layers with parameters are known and run once, else ``torch.func`` on
    batches of one. What mixes examples is refused: nobody could say then what one record's part is.
    """
    minimised = (CROSS_ENTROPY if loss is F.cross_entropy else build_loss(loss)).of(batch.labels)
    check_separable(model, minimised)
    checked = _CHECKED.setdefault(model, {})
    key = (tuple(batch.inputs.shape), batch.inputs.dtype, model.training)
    if key not in checked and len(batch):
        checked[key] = _fits(model, batch, minimised)
    if len(batch) and checked[key] and (found := capture(model, batch, minimised)) is not None:
        return found
    if not len(batch):
        return Held({n: p.detach().new_zeros(0, *p.shape) for n, p in model.named_parameters() if p.requires_grad})
    return _one_by_one(model, batch, minimised)


_CHECKED: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()  # models that were tried, by input


def _fits(model: nn.Module, batch: Batch, loss: Loss) -> bool:
    """Return whether what the layers saw gives the gradient of a record alone; raise where examples are mixed."""
    devices = [batch.inputs.device] if batch.inputs.is_cuda else []
    with torch.random.fork_rng(devices), quiet(model, transformed=False), full_precision():
        alone = check_unmixed(model, batch, loss)
        found = capture(model, batch, loss)
        first = torch.zeros(len(batch), device=batch.inputs.device)
        first[0] = 1
        return found is not None and same(found.weighted_sum(first), alone)


def capture(model: nn.Module, batch: Batch, loss: Loss) -> Captured | None:
    """Return the gradients by what the layers saw in one pass forth and back; None where this does not say it all."""
    layers = known(model)
    if layers is None:
        return None
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
    seen: list[tuple[nn.Module, Tensor, GradientEdge, int]] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if output.requires_grad:
            a = args[0] if args else next(iter(kwargs.values()))
            seen.append((module, a.detach(), get_gradient_edge(output), a._version))

    handles = [m.register_forward_hook(look, prepend=True, with_kwargs=True) for m in layers]
    try:
        with torch.enable_grad():
            value = loss.each(model(batch.inputs), batch.labels).sum()
    finally:
        for handle in handles:
            handle.remove()
    if not seen or any(way > 1 for way in ways_into(value, list(weights.values()))[0]):
        return None  # a weight that is used twice
    once = len({module for module, *_ in seen}) == len(seen)
    whole = all(len(a) == len(batch) and a._version == version for _, a, _, version in seen)
    if not once or not whole or len(seen) < len(layers):
        return None
    deltas = torch.autograd.grad(value, [edge for *_, edge, _ in seen], allow_unused=True)
    if any(d is None for d in deltas):  # a layer whose output leads nowhere
        return None
    found = [
        KINDS[type(module)](module, layers[module], a[None], d[None])
        for (module, a, _, _), d in zip(seen, deltas, strict=True)
    ]
    return Captured(found, {n: p.detach() for n, p in weights.items()}, (len(batch),))


def _one_by_one(model: nn.Module, batch: Batch, loss: Loss) -> Records:
    """Return the gradients by ``torch.func``: the model runs on batches of one."""
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}

    def value(free: Params, x: Tensor, y: Tensor) -> Tensor:
        state = fixed | copied_buffers(model) | free  # copied: a forward pass may write to them
        return loss.each(functional_call(model, state, (x[None],)), y[None]).sum()

    def part(x: Tensor, y: Tensor) -> Held:
        with plain_attention(), plain_checkpoints(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # where torch takes one by one itself
            try:
                found = vmap(partial(grad(value), weights), randomness="different")(x, y)
            except (RuntimeError, NotImplementedError) as error:
                if isinstance(error, torch.cuda.OutOfMemoryError):
                    raise
                alone = [grad(value)(weights, *one) for one in zip(x, y, strict=True)]
                found = {n: torch.stack([g[n] for g in alone]) for n in weights}
        return Held({n: g.detach() for n, g in found.items()})

    each = sum(w.numel() * w.element_size() for w in weights.values())
    size = max(1, HELD // max(each, 1))
    if len(batch) <= size:
        return part(batch.inputs, batch.labels)
    pieces = [batch[start : start + size] for start in range(0, len(batch), size)]
    return InParts([partial(part, p.inputs, p.labels) for p in pieces], [len(p) for p in pieces], weights)


def split(flat: Tensor, like: Params) -> Params:
    """Return vectors (..., p) as tensors by name, each (..., *shape)."""
    parts = zip(like.items(), flat.split([p.numel() for p in like.values()], -1), strict=True)
    return {name: part.reshape(*part.shape[:-1], *p.shape) for (name, p), part in parts}


def clipped_sum(
    records: Records, clip: float, coordinates: "Coordinates | None" = None, present: Tensor | None = None
) -> Tensor:
    """Return h = Σ_j c_j P g_j as one vector (p,), or of K clients (K, p), in float32 at least.

    Each slot counts by itself, whatever lies in the others. ``present``: 0 for a slot (N,) or (K, N) that is to be
    zero. With coordinates P g_j is g_j + Uᵀ D U g_j, with D = s^(-½) - 1 and U g_j as it was computed of this record:
    so h is right for any U and s, and going back by P⁻¹ is left to whoever has the noise on it.
    """
    total: Tensor | None = None
    for some, which in records.pieces():
        with full_precision(), torch.autocast(_device(records.like).type, enabled=False):
            found = _of_piece(some, clip, coordinates, None if present is None else present[..., which])
        total = found if total is None else total.double() + found
    assert total is not None
    return narrow(total, records.count, torch.promote_types(next(iter(records.like.values())).dtype, torch.float32))


def _of_piece(records: Records, clip: float, coordinates: "Coordinates | None", present: Tensor | None) -> Tensor:
    lengths, masses = records.square_norms(), records.square_masses()
    if coordinates is None:
        factors = clip_factors(lengths, clip, masses)
        return _flat(records.weighted_sum(_those(factors, present)), lengths.ndim - 1)
    along, lengths = coordinates.mapped(records)
    factors = _those(clip_factors(lengths, clip, masses, MAPPED), present)
    beside = torch.einsum("...n,...nr->...r", factors, torch.where(factors[..., None] > 0, along, 0.0))
    plain = _flat(records.weighted_sum(factors, MAPPED), lengths.ndim - 1)
    return plain.double() + coordinates.spread(beside)


def _those(factors: Tensor, present: Tensor | None) -> Tensor:
    return factors if present is None else factors * present.to(factors)


def _flat(tree: Params, lead: int) -> Tensor:
    """Return all entries as one vector, or as one (K, p) for each client."""
    return torch.cat([g.flatten(lead) if g.ndim > lead else g[..., None] for g in tree.values()], -1)


def _device(like: Params) -> torch.device:
    return next(iter(like.values())).device
