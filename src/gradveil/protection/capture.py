"""Gradients of records from what the layers show of a pass: our own, or a training pass that is not ours.

That is what a layer got, and the loss's gradient by what it gave. In a training pass neither the loss has to be known
nor a second pass made: a module that holds weights and is of no known kind is run again by itself, record by record.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from gradveil.errors import DefenseError
from gradveil.gradients.functional import full_precision, quiet
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.losses import build as build_loss
from gradveil.modules import copied_buffers, tensors_in, ways_into
from gradveil.protection.layers import KINDS, LayerRecord, ModuleRecord, for_each, is_known, known, tensors_of
from gradveil.protection.loss_graph import MIXED, halves, only
from gradveil.protection.records import Captured, Held, InParts, Records
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
        if any(p is not None and p.is_complex() for p in module._parameters.values()):
            raise DefenseError(
                f"The weights of {name or 'the model'!r} are complex numbers, for which noise is not defined here. "
                f"Train real and imaginary parts as weights of their own."
            )
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


def check_unmixed(model: nn.Module, batch: Batch, loss: Loss, weights: Params | None = None) -> Params:
    """Raise where the first two examples together give another gradient than one by one; return that of the first."""
    first = _gradient(model, batch[:1], loss, weights)
    if len(batch) == 1:
        return first
    second, together = (_gradient(model, some, loss, weights) for some in (batch[1:2], batch[:2]))
    if not same(together, add(first, second)) and same(first, _gradient(model, batch[:1], loss, weights)):  # no chance
        raise DefenseError(
            f"In {type(model).__name__} the gradient of an example depends on the others of its batch: no record can "
            f"be clipped by itself. Use layers that look at one example at a time."
        )
    return first


def _gradient(model: nn.Module, batch: Batch, loss: Loss, weights: Params | None) -> Params:
    free = {n: p if weights is None else weights[n] for n, p in model.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        output = model(batch.inputs) if weights is None else functional_call(model, weights, (batch.inputs,))
        value = loss.each(output, batch.labels).sum()
    return dict(zip(free, torch.autograd.grad(value, list(free.values()), materialize_grads=True), strict=True))


def _drawn_weights(model: nn.Module) -> Params:
    """Return random weights of a usual size, which have nothing to do with the model's own.

    Who sends the weights could close a gate before what mixes records, while somebody looks, and open it later.
    """
    rng, found = torch.Generator().manual_seed(0), {}
    for name, p in model.named_parameters():
        drawn = torch.rand(p.shape, generator=rng) + 0.5 if p.ndim < 2 else torch.randn(p.shape, generator=rng)
        size = (2 * len(p) / p.numel()) ** 0.5 if p.ndim > 1 and p.numel() else 1.0
        found[name] = (drawn * size).to(p).requires_grad_(p.requires_grad) if p.is_floating_point() else p.detach()
    return found


def same(a: Params, b: Params) -> bool:
    """Return whether two gradients are the same but for rounding; where one is not finite, nothing is known."""
    apart, on_cuda = float(norm(subtract(a, b))), any(value.is_cuda for value in b.values())
    return not apart > (0.02 if on_cuda else 1e-3) * float(norm(b)) + 1e-7  # CUDA may round to TF32


HELD = 2**28  # bytes of gradients that are held at once; beyond, they are computed again when they are needed again


def records_of(model: nn.Module, batch: Batch, loss: Loss | Callable[[Tensor, Tensor], Tensor]) -> Records:
    """Return the gradients of each record's loss at the model's weights, by the fastest way that fits.

    That is by what each layer saw, where all layers with parameters are known and run once, else ``torch.func`` on
    batches of one. What mixes examples is refused: nobody could say then what one record's part is.
    """
    minimised = (CROSS_ENTROPY if loss is F.cross_entropy else build_loss(loss)).of(batch.labels)
    check_separable(model, minimised)
    checked = _CHECKED.setdefault(model, {})
    buffers = [hash(b.detach().cpu().numpy().tobytes()) for b in model.buffers() if b.is_floating_point()]
    key = (tuple(batch.inputs.shape), batch.inputs.dtype, model.training, *buffers)
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
        with suppress(RuntimeError, ValueError, AssertionError):  # where it does not run on such weights
            check_unmixed(model, batch, loss, _drawn_weights(model))
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


def records_together(
    model: nn.Module, weights: Params, inputs: Tensor, labels: Tensor, loss: Loss, outputs: dict[nn.Module, torch.Size]
) -> Captured:
    """Return the gradients of K clients' records at their own weights (K, *shape): inputs (K, N, ...), labels (K, N).

    ``outputs``: the shape of each layer's output for one record (see ``output_shapes``). A zero is added to every
    output, and the loss's gradient by it is δ.
    """
    layers = known(model) or {}

    def value(taps: list[Tensor], own: Params, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        inside: dict[nn.Module, Tensor] = {}

        def look(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            inside[module] = args[0]
            return output + taps[order[module]]

        handles = [m.register_forward_hook(look, prepend=True) for m in layers]
        try:
            result = loss.each(functional_call(model, own, (x,)), y).sum()
        finally:
            for handle in handles:
                handle.remove()
        return result, [inside[m] for m in layers]

    order = {m: i for i, m in enumerate(layers)}
    like = next(iter(weights.values()))
    taps = [like.new_zeros(*inputs.shape[:2], *outputs[m]) for m in layers]
    deltas, inside = vmap(grad(value, has_aux=True))(taps, weights, inputs, labels)
    found = [KINDS[type(m)](m, layers[m], a.detach(), d) for m, a, d in zip(layers, inside, deltas, strict=True)]
    return Captured(found, {n: w[0].detach() for n, w in weights.items()}, tuple(inputs.shape[:2]))


def output_shapes(model: nn.Module, batch: Batch, loss: Loss) -> dict[nn.Module, torch.Size] | None:
    """Return the shape of each trained layer's output for one record; None where the records cannot be stacked."""
    records = records_of(model, batch, loss)
    if not isinstance(records, Captured):
        return None
    return {seen.layer: seen.delta.shape[2:] for seen in records.layers}


def _one_by_one(model: nn.Module, batch: Batch, loss: Loss) -> Records:
    """Return the gradients by ``torch.func``: the model runs on batches of one."""
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    fixed = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}

    def value(free: Params, x: Tensor, y: Tensor) -> Tensor:
        state = fixed | copied_buffers(model) | free  # copied: a forward pass may write to them
        return loss.each(functional_call(model, state, (x[None],)), y[None]).sum()

    def part(x: Tensor, y: Tensor) -> Held:
        found = for_each(partial(grad(value), weights), x, y, randomness="different")
        return Held({n: g.detach() for n, g in found.items()})

    each = sum(w.numel() * w.element_size() for w in weights.values())
    size = max(1, HELD // max(each, 1))
    if len(batch) <= size:
        return part(batch.inputs, batch.labels)
    pieces = [batch[start : start + size] for start in range(0, len(batch), size)]
    return InParts([partial(part, p.inputs, p.labels) for p in pieces], [len(p) for p in pieces], weights)


@dataclass(frozen=True)
class Ran:
    """A layer that ran in a training pass: what it got, and where the loss's gradient by what it gave arrives."""

    layer: str
    module: nn.Module
    given: Any  # its arguments, by place and by name
    places: tuple[int, ...]  # of the tensors with gradients among all that it gave
    edges: tuple[GradientEdge, ...]  # of these
    before: tuple[Node, ...]  # what made its arguments
    written: tuple[int, ...]  # how often each tensor among its arguments had been written to

    @property
    def is_as_it_was(self) -> bool:
        """Whether nobody wrote to the arguments since: a gradient is made of what they hold now."""
        return self.written == _written(self.given)

    def seen(self, deltas: Sequence[Tensor | None], count: int) -> LayerRecord | None:
        """Return what it saw, with the loss's gradients (N, ...) by what it gave; None where all of these are none."""
        if not self.is_as_it_was:
            raise DefenseError(
                f"What layer {self.layer!r} got was written to after it ran, so a record's gradient does not follow "
                f"from it. Write to a copy: out of place, or x.clone()."
            )
        there = {place: d for place, d in zip(self.places, deltas, strict=True) if d is not None}
        if not there:
            return None
        if odd := [tuple(d.shape) for d in there.values() if d.shape[:1] != (count,)]:
            raise DefenseError(_not_rows(self.layer, self.module, odd, count))
        delta = next(iter(there.values()))
        prefix = f"{self.layer}." if self.layer else ""
        first = tensors_of(self.given)[0]
        if is_known(self.module):
            return KINDS[type(self.module)](self.module, prefix, first[None], delta[None])
        return ModuleRecord(self.module, prefix, first[None], delta[None], given=self.given, deltas=there)


Given = tuple[tuple[Any, ...], dict[str, Any]]  # arguments, by place and by name
Look = Callable[[str, list[Tensor], list[Tensor]], None]  # the layer, what it gets, what it gives


class TrainedLayers:
    """The layers of a model that hold its trained weights: all that has to be seen of a pass.

    A layer is the module that holds the weight, with all that is inside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.trained = [p.requires_grad for p in model.parameters()]
        self.layers = tuple(_holders(model))
        names: dict[int, str] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            if p.requires_grad and names.setdefault(id(p), name) != name:
                raise DefenseError(
                    f"{name} and {names[id(p)]} are one weight, and what a record adds to it in two layers cannot be "
                    f"told from what each of them shows. Untie them, or freeze the weight."
                )

    @property
    def all_known(self) -> bool:
        """Whether every layer's records follow from what it saw, so that none has to be run again."""
        return all(is_known(self.model.get_submodule(layer)) for layer in self.layers)

    def check(self) -> None:
        """Raise where a pass would mix records, or show too little of them."""
        check_layers(self.model)
        if self.trained != [p.requires_grad for p in self.model.parameters()]:
            raise DefenseError(
                "Weights were added, frozen or freed under the guard. Do that before the model is protected."
            )
        for layer in self.layers:
            module = self.model.get_submodule(layer)
            if not is_known(module) and _is_random(module):
                raise DefenseError(
                    f"The weights of {layer or 'the model'!r} ({type(module).__name__}) are used in a pass that draws "
                    f"random numbers, and it would have to be run again for each record. Set its dropout to 0."
                )

    def check_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
        """Raise where half of the records, each in its place, give something else with the same half around them.

        Looked at with the weights as they are and with others. Passes draw the same random numbers in the same places,
        so dropout keeps records apart as well.
        """
        if count < 2:
            return
        self._check_apart((args, kwargs), count, {})
        drawn = _drawn_weights(self.model)
        with suppress(RuntimeError, ValueError, AssertionError):  # where it does not run on such weights
            self._check_apart((args, kwargs), count, drawn)
            self._check_slopes((args, kwargs), count, drawn)  # those by its own weights a step looks at, with the loss

    def _check_apart(self, given: Given, count: int, weights: Params) -> None:
        at, whole = partial(self._layers_at, given, count, weights), list(range(count))
        own = at(whole)
        for layer in self.layers:
            if layer in own and len(own[layer]) != count:
                raise DefenseError(_not_rows(layer, self.model.get_submodule(layer), [tuple(own[layer].shape)], count))

        def differs(order: list[int], half: list[int]) -> str | None:
            other = at(order)
            both = ((what, own[what][half], other[what][half]) for what in own if what in other)
            return next((what for what, a, b in both if not _alike(a, b)), None)

        for half in halves(count):
            in_place = set(half)  # its records are in the others' places too
            order = [i if i in in_place else half[i % len(half)] for i in whole]
            if (what := differs(order, half)) is not None:
                said = f"what layer {what!r} gets" if what in self.layers else "what the model gives"
                raise DefenseError(_not_apart(self.model, said, again=differs(whole, half) is None))

    def _layers_at(self, given: Given, count: int, weights: Params, order: list[int]) -> dict[str, Tensor]:
        """Return what each layer gets where the records stand in this order, and what the model gives, by number."""
        leaves, tree = tree_flatten(given)
        mine = (t[order] if isinstance(t, Tensor) and t.shape[:1] == (count,) else t for t in leaves)
        found: dict[str, Tensor] = {}
        with torch.enable_grad():  # as in a training pass: some models mix records there alone
            moved = tree_unflatten(list(mine), tree)
            gave = self._run(moved, weights, lambda layer, got, _: found.update({layer: got[0]}))
        return found | {f" {n}": t.detach() for n, t in enumerate(gave) if t.shape[:1] == (count,)}

    def _check_slopes(self, given: Given, count: int, weights: Params) -> None:
        """Raise where what the model gives for some records has a slope by what a layer gave for others."""
        inside: list[Tensor] = []
        with torch.enable_grad():
            gave = self._run(given, weights, lambda _, __, found: inside.extend(found[:1]))
        inside = [t for t in inside if t.requires_grad and t.shape[:1] == (count,)]
        rows = [t for t in gave if t.requires_grad and t.shape[:1] == (count,)]
        ends = [torch.linspace(1, 2, t.numel(), device=t.device).to(t.dtype).view_as(t) for t in rows]
        for half in halves(count) if rows and inside else ():
            seen = [only(end, half) for end in ends]
            for slope in torch.autograd.grad(rows, inside, seen, retain_graph=True, allow_unused=True):
                if slope is not None and bool((slope - only(slope, half)).abs().max() > 1e-3 * slope.abs().max()):
                    raise DefenseError(MIXED)

    def _run(self, given: Given, weights: Params, look: Look) -> list[Tensor]:
        """Run the model and leave it as it was; ``look`` is shown what each layer gets and gives."""
        found = {}

        def before(layer: str, _: nn.Module, own: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[layer] = [t.detach().clone() for t in tensors_of((own, named))[:1]]

        def after(layer: str, _: nn.Module, __: Any, output: Any) -> None:
            look(layer, found[layer], tensors_of(output))

        hooks = []
        for layer in self.layers:
            module = self.model.get_submodule(layer)
            hooks += [module.register_forward_pre_hook(partial(before, layer), with_kwargs=True)]
            hooks += [module.register_forward_hook(partial(after, layer))]
        device = next((t.device for t in tensors_of(given) if t.is_cuda), None)
        try:
            with torch.random.fork_rng([] if device is None else [device]):
                return tensors_in(functional_call(self.model, copied_buffers(self.model) | weights, *given))
        finally:
            for hook in hooks:
                hook.remove()

    def ran(self, layer: str, given: Any, output: Any, count: int) -> Ran:
        """Take note of a layer that has run on this many records."""
        module, (args, kwargs) = self.model.get_submodule(layer), given
        got = tensors_of(args[0] if len(args) == 1 and not kwargs else given)
        if not got or len(got[0]) != count:
            raise DefenseError(_not_rows(layer, module, [tuple(t.shape) for t in got], count))
        before = tuple(t.grad_fn for t in got if t.grad_fn is not None)
        alone = not kwargs and len(args) == 1 and got[0] is args[0]  # as most layers are called
        held = ((args[0].detach(),), {}) if alone else tree_map(_detached, given)
        gave = {i: get_gradient_edge(t) for i, t in enumerate(tensors_of(output)) if t.requires_grad}
        return Ran(layer, module, held, tuple(gave), tuple(gave.values()), before, _written(held))

    def records(self, ran: Iterable[Ran], deltas: Sequence[Tensor | None], count: int) -> Captured:
        """Return the gradients of records whose losses' gradients by all that the layers gave are these."""
        seen, at = [], 0
        for each in ran:
            seen.append(each.seen(deltas[at : at + len(each.edges)], count))
            at += len(each.edges)
        like = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return Captured([layer for layer in seen if layer is not None], like, (count,))


def _written(given: Any) -> tuple[int, ...]:
    return tuple(-1 if t.is_inference() else t._version for t in tensors_of(given))


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _not_apart(model: nn.Module, what: str, *, again: bool) -> str:
    """Return what to say of a model whose records are not apart, or (not ``again``) that never runs twice alike."""
    name = type(model).__name__
    if again:
        return (
            f"In {name} {what} for a record depends on the others of its batch: no record can be clipped by itself. "
            f"Use layers that look at one record at a time."
        )
    return (
        f"{name} gives something else when it runs again: it draws random numbers that are not torch's default ones, "
        f"or changes itself, so nothing shows that its records are kept apart. Draw as nn.Dropout does."
    )


def _not_rows(layer: str, module: nn.Module, shapes: list[tuple[int, ...]], count: int) -> str:
    return (
        f"Layer {layer!r} ({type(module).__name__}) saw {', '.join(map(str, shapes)) or 'no tensor'} for {count} "
        f"records: its rows are not one record each. Keep records in the first dimension of what layers get and give."
    )


def _holders(model: nn.Module) -> Iterator[str]:
    """Yield the modules that hold trained weights; what is inside one of them belongs to it."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in inside):
            continue
        own = any(p is not None and p.requires_grad for p in module._parameters.values())
        made = "parametrizations" in module._modules and any(p.requires_grad for p in module.parameters())
        if own or made:
            inside.append(path)
            yield path


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether rows are the same but for rounding; where they are not finite, nothing is known."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    apart, size = (a - b).abs().max() if a.numel() else torch.zeros(()), a.abs().max() if a.numel() else torch.zeros(())
    return not bool(apart > 1e-3 * size + 1e-7)


def _is_random(module: nn.Module) -> bool:
    """Whether a module draws random numbers in a training pass, as far as can be seen."""
    kinds = (_DropoutNd, nn.MultiheadAttention, nn.RNNBase)
    chances = (
        m.p if isinstance(m, _DropoutNd) else m.dropout for m in module.modules() if isinstance(m, kinds) and m.training
    )
    return any(float(chance) > 0 for chance in chances)
