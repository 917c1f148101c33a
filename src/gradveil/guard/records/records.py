"""The gradients of each record's loss, one by one, without the caller knowing how they are computed."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap

from gradveil.gradients.functional import quiet
from gradveil.gradients.precision import full_precision
from gradveil.guard.records.captured import Seen
from gradveil.guard.records.held import Held, InParts, Records
from gradveil.guard.records.layer_kinds import KINDS, known
from gradveil.guard.records.rounding import Pair, wide
from gradveil.guard.records.separable import check_separable, check_unmixed, same
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.losses import build as build_loss
from gradveil.modules import copied_buffers, plain_attention, plain_checkpoints, ways_into
from gradveil.tree import Params
from gradveil.types import Batch

__all__ = ["HELD", "Captured", "Held", "InParts", "Records", "capture", "records_of"]

HELD = 2**28  # bytes of gradients that are held at once; beyond, they are computed again when they are needed again


@dataclass
class Captured(Records):
    """Gradients by what the layers saw: of N records, or of (K, N) where the model's weights are those of K clients."""

    layers: list[Seen]
    like: Params  # the trained parameters, in order
    shape: tuple[int, ...]  # (N,) or (K, N)

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many records a client has."""
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
        """Return bounds of each ||g_j||²."""
        return self._lengths[0].view(self.shape)

    def square_masses(self) -> Tensor:
        """Return bounds of what cancels in each g_j, squared."""
        return self._lengths[1].view(self.shape)

    @cached_property
    def formed(self) -> int:
        """Positions of gradients that ``along`` forms and ``weighted_sum`` does not."""
        return max(layer.formed for layer in self.layers)

    def along(self, directions: Params) -> Tensor:
        """Return the inner products with directions (R, *shape)."""
        found = [
            layer.along(which, directions[layer.prefix + which].to(layer.delta))
            for layer in self.layers
            for which in layer.trained
        ]
        return torch.stack(found).sum(0).reshape(*self.shape, -1)

    def each(self) -> Params:
        """Return the gradients (N, *shape) or (K, N, *shape)."""
        found = {layer.prefix + w: layer.each(w) for layer in self.layers for w in layer.trained}
        empty = self.layers[0].delta.new_zeros(())
        return {
            n: found.get(n, empty).expand(*self._lead, *p.shape).reshape(*self.shape, *p.shape)
            for n, p in self.like.items()
        }

    def weighted_sum(self, weights: Tensor, mass: float = 1.0) -> Params:
        """Return Σ w_j g_j; with K clients, for each (K, *shape)."""
        factors, bad = weights.view(self._lead), ~self._lengths[1].isfinite()
        layers = [layer.without(bad & (factors == 0)) for layer in self.layers] if bool(bad.any()) else self.layers
        found = {layer.prefix + w: layer.total(w, factors, mass) for layer in layers for w in layer.trained}
        lead = self.shape[:-1]
        return {
            n: found[n].reshape(*lead, *p.shape) if n in found else wide(p.new_zeros(*lead, *p.shape))
            for n, p in self.like.items()
        }

    def dealt(self, clients: int) -> "Captured":
        """Return the records of each client (K, N) as those of so many clients (K · clients, N / clients)."""
        layers = [layer.dealt(clients) for layer in self.layers]
        return Captured(layers, self.like, (self.shape[0] * clients, self.shape[1] // clients))

    def clients(self, some: slice) -> "Captured":
        """Return the records of some clients."""
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
