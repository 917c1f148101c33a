"""Hooks of a defence on a model, on backward passes and on the optimizers that step on its weights."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError
from gradveil.modules import lifted, under_transform
from gradveil.privacy.noise import SecretDraws, Source
from gradveil.protection.defense import Defense, own_draws
from gradveil.protection.passes import (
    Examples,
    OfExamples,
    OneThread,
    Pass,
    Report,
    check_layer,
    plain_python,
    stay_out_of_compiled_graphs,
    substitute,
)
from gradveil.protection.per_record_step import (
    PerRecordStep,
    Stamp,
    check_state,
    copied,
    gradients_of,
    is_same,
    is_stamped,
    left_as_it_was,
    note_state,
    overwrite,
    stamp,
)
from gradveil.protection.provenance import CHANGED, Bits, Part, Provenance
from gradveil.registry import describe
from gradveil.tree import Params

_watching: "WeakSet[Attachment]" = WeakSet()
_handles: list[RemovableHandle] = []
_last: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()
_own: Any = torch.autograd.backward


def watch(listener: "Attachment") -> None:
    """Tell the listener of every backward pass and optimizer step from now on; it is not kept alive by this."""
    _watching.add(listener)
    if listener.per_record is not None:
        torch.autograd.backward = _backward
    if not _handles:
        _handles.extend([register_optimizer_step_pre_hook(_on_step), register_optimizer_step_post_hook(_after_step)])


def unwatch(listener: "Attachment") -> None:
    """Tell this listener no more; torch is as it was after the last one."""
    _watching.discard(listener)
    if all(other.per_record is None for other in _watching):
        torch.autograd.backward = _own
    while not _watching and (_handles or _last):
        (_handles.pop() if _handles else _last.popitem()[1]).remove()


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``, where no attachment takes it."""
    roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
    plain = grad_tensors is None and grad_variables is None and inputs is None and not create_graph
    retain = create_graph if retain_graph is None else retain_graph
    if not any(listener.take_backward(roots, plain, retain) for listener in list(_watching)):
        _own(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (handle := _last.get(optimizer)) is None:
        handle = _last[optimizer] = optimizer.register_step_pre_hook(_at_last)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def _at_last(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell every listener now or, where a closure makes the gradients inside the step, after the closure."""
    for listener in list(_watching):
        listener.begin_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def then_tell() -> Any:
        value = None if closure is None else closure()
        for listener in list(_watching):
            listener.before_step(optimizer)
        return value

    if closure is None:
        return then_tell()
    in_place = "closure" in kwargs
    return (args[:1], kwargs | {"closure": then_tell}) if in_place else ((args[0], then_tell, *args[2:]), kwargs)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in list(_watching):
        listener.after_step(optimizer)


@dataclass(eq=False)
class Hook:
    """A method of an attachment as a hook; a copy of the model takes both along."""

    attachment: "Attachment"
    method: str
    layer: str | None = None  # whose hook it is, where the method wants to know

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        named = () if self.layer is None else (self.layer,)
        return plain_python(getattr(self.attachment, self.method), *named, module, *args)


class Attachment:
    """A defence on a model: from the first hook to the last look at its weights, pass by pass and step by step."""

    def __init__(
        self,
        model: nn.Module,
        defense: Defense,
        simulated: Generator | None,
        strict: bool,
        per_record: PerRecordStep | None = None,
    ) -> None:
        self.model, self.defense, self.strict = model, defense, strict
        self.layers, self.acts_on = defense.layers(model), defense.acts_on
        self.in_passes = bool(self.acts_on & {"batch", "representation"})
        self.per_record = per_record  # of a defence of records
        self.simulated = simulated
        self.handles: list[RemovableHandle] = []
        self.alone = OneThread()
        self.keeper: RemovableHandle | None = None  # its hook, which stays where the others are lifted
        self.stale: Params = {}  # checksums of gradients from before the guard, which no step may use
        self._begin_anew(_checksum(model))

    def _begin_anew(self, at_start: int | None) -> None:
        """Set what belongs to this object alone, and no copy of it has: counts, and what is under way."""
        self.report = Report(noise=self.defense.noise_from(SecretDraws() if self.simulated is None else self.simulated))
        self.current: Pass | None = None
        self.stepping = False  # an optimizer is at work on the weights
        self.held: list[Part] = []  # by the optimizer that is at work
        self.at_start = at_start  # of the weights
        self.past = False  # at the end: whether weights were changed past the defence
        self.bare: list[str] = []  # at the end: weights whose gradients are there without their noise
        self.stamps: WeakKeyDictionary[Optimizer, Stamp] = WeakKeyDictionary()  # of gradients that it has defended
        self._provenance: Provenance | None = None
        stay_out_of_compiled_graphs()

    def __getstate__(self) -> dict[str, Any]:
        alone = ("report", "current", "stepping", "held", "at_start", "past", "bare", "stamps", "_provenance")
        return {name: value for name, value in self.__dict__.items() if name not in alone}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_anew(None)  # a copy is made in the middle
        if self.handles:
            watch(self)

    @property
    def rng(self) -> Source:
        """Where noise comes from: a simulation's generator, else secret, on the weights' device where it can be."""
        if self.simulated is not None:
            return self.simulated
        devices = {p.device for p in self.model.parameters() if p.is_cuda and self.defense.draws_on_device}
        return SecretDraws(devices.pop() if len(devices) == 1 else torch.device("cpu"))

    @property
    def provenance(self) -> Provenance:
        """Where the gradients and weights came from that the defence answers for."""
        if self._provenance is None:
            self._provenance = Provenance(self.model, self.layers, self.acts_on)
        return self._provenance

    @property
    def on(self) -> bool:
        """Whether to act: attached (compiled code may keep hooks that are gone), in train mode, with gradients."""
        return bool(self.handles) and self.model.training and torch.is_grad_enabled()

    def attach(self) -> None:
        add, model = self.handles.append, self.model
        for layer in self.layers:
            check_layer(model, layer)
        self.keeper = model.register_forward_pre_hook(self.alone, prepend=True)
        add(model.register_forward_pre_hook(Hook(self, "enter"), with_kwargs=True))
        watched = () if self.per_record is None else self.per_record.watched.layers
        ran = [*((layer, "defend_output") for layer in self.layers), *((layer, "layer_ran") for layer in watched)]
        for layer, method in ran:
            hook = Hook(self, method, layer)
            add(model.get_submodule(layer).register_forward_hook(hook, prepend=True, with_kwargs=True))
        for part in model.modules():
            if self.provenance.owned_by(part) or self.per_record is not None:
                add(part.register_load_state_dict_pre_hook(Hook(self, "before_loading")))
                add(part.register_load_state_dict_post_hook(Hook(self, "after_loading")))
                if self.provenance.has_passes and part is not model:
                    add(part.register_forward_hook(Hook(self, "part_ran")))
        add(model.register_forward_hook(Hook(self, "leave"), always_call=True))
        if self.per_record is not None:
            add(model.register_state_dict_pre_hook(Hook(self, "before_saving")))
            self.stale = {name: Bits([g]).sum() for name, g in gradients_of(dict(model.named_parameters())).items()}
        watch(self)

    def detach(self) -> None:
        """Look at the weights for the last time, and remove every hook; once is enough."""
        if self.handles:
            self.past, self.bare = self.went_past, self.without_noise
            self.report.skipped += self.past and not self.strict
            self.provenance.untie()
        while self.handles:
            self.handles.pop().remove()
        if self.keeper is not None:
            self.keeper.remove()
        self.alone.on = False
        unwatch(self)

    # A forward pass.

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass begins: note its inputs; return the arguments where the defence changes the batch."""
        self.current = None
        if self.on and (self.in_passes or self.per_record) and under_transform():
            raise DefenseError(
                "A guarded model was called inside a torch.func transform (vmap, grad, ...), where it cannot be "
                "defended. Call model(x) on the whole batch and loss.backward() instead."
            )
        if self.handles and torch.is_grad_enabled():
            if not under_transform():  # where other tensors are in the place of weights
                self.provenance.tie()
            self.provenance.begin()
        if self.on and self.per_record is not None:
            self.per_record.enter(args, kwargs, self.handles)
        if not (self.on and self.in_passes):
            return None
        examples = Examples(args, kwargs)
        x, changed = examples.x, None
        alone = len(args) == 1 and args[0] is x and not kwargs
        if "batch" in self.acts_on:
            x, changed = examples.changed_by(self.defense, self.rng)
            if torch.equal(examples.x, x):
                self.undefended(f"{describe(self.defense)} left the examples as they are. Give it more to change.")
                return None
        self.current = Pass(self.model if alone else OfExamples(self.model, examples), x)
        return changed

    def defend_output(self, layer: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """A defended layer has run: return its output with the weight gradient built from r'."""
        if not self.on:
            return None
        first, r = next(iter(module._forward_hooks.values())), args[0] if args else kwargs["input"]
        if not (isinstance(first, Hook) and first.attachment is self):
            raise DefenseError(
                f"A forward hook was put before the guard's on layer {layer!r}, and what it makes of the output "
                f"would be lost. Register it without prepend."
            )
        if self.current is None:
            self.undefended(
                f"Layer {layer!r} ran outside the model's own call, so the input that belongs to it is unknown. Call "
                f"model(x), not model.forward(x) or a part of the model; activation checkpointing does this as well."
            )
            return None
        if layer in self.current.reached:
            raise DefenseError(f"Layer {layer!r} runs twice in one pass; its two inputs cannot be told apart.")
        if not len(r):  # no examples, no gradient
            self.current.reached.add(layer)
            return None
        changed = self.current.perturbed(self.defense, layer, r, self.rng, self.report, self.handles)
        if changed.data_ptr() == r.data_ptr():
            self.undefended(
                f"{describe(self.defense)} leaves all {r[0].numel()} entries that layer {layer!r} gets as they are, so "
                f"nothing is defended. Give it a larger share, or a count."
            )
            return None
        self.current.reached.add(layer)
        output = substitute(module, r, changed, self.provenance.carrier(layer, module))
        self.current.outputs.append((module, output))
        return output  # type: ignore[no-any-return]

    def layer_ran(self, layer: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.on and self.per_record is not None:
            self.per_record.ran(layer, args, kwargs, output)

    def part_ran(self, module: nn.Module, args: Any, output: Any) -> None:
        """A part that has weights has run: outside the model's own call its output is not defended."""
        if self.current is None and self.handles and torch.is_grad_enabled():
            self.provenance.mark(output, through=self.provenance.within_defended())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A pass is over, also one that was broken off by an error and has no output."""
        if not self.alone.is_mine:
            return
        try:
            self._count(output)
        finally:
            self.alone.release()

    def _count(self, output: Any) -> None:
        current, self.current = self.current, None
        if self.on and self.per_record is not None:
            self.per_record.leave(output)
        if output is not None and self.handles and self.provenance.has_passes and torch.is_grad_enabled():
            self.provenance.mark(output, through=current is not None or self.provenance.within_defended())
        if current is None or output is None:
            return
        if self.layers and not current.reached:
            self.undefended(
                f"A training pass did not run {', '.join(self.layers)} as a layer, so nothing was defended. Is the "
                f"weight used directly, as in F.linear(x, layer.weight)?"
            )
        elif (message := current.used_elsewhere(output)) is not None:
            self.undefended(message)
        elif self.per_record is None:
            self.report.steps += 1
            self.report.examples += len(current.x)

    def before_loading(self, module: nn.Module, *_: Any) -> None:
        self.provenance.tie()
        self.check_weights(self.provenance.of(module))
        if self.per_record is not None:
            self.per_record.before_loading(module)

    def after_loading(self, module: nn.Module, *_: Any) -> None:
        self.provenance.load(module)
        if self.per_record is not None:
            self.per_record.loaded(module)

    def before_saving(self, module: nn.Module, *_: Any) -> None:
        """The whole model's ``state_dict()`` is about to be read, under a defence of records."""
        if self.per_record is not None and not self.per_record.carried.looking and not self.stepping:
            self.provenance.tie()
            self.check_weights(self.provenance.parts)
            self.per_record.check_carried()

    def check_weights(self, parts: Iterable[Part]) -> None:
        """Refuse weights that were changed past the defence; what else was done to them is accounted for."""
        if past := [part for part in parts if part.moved()]:
            self.undefended(CHANGED)
            for part in past:
                part.account()

    @property
    def went_past(self) -> bool:
        """Whether weights were changed past the defence since the last step, or before it was detached."""
        if self.handles:
            self.provenance.tie()
            return any(part.moved() for part in self.provenance.parts)
        return self.past

    @property
    def weights_changed(self) -> bool:
        return self.at_start is not None and _checksum(self.model) != self.at_start

    def take_backward(self, roots: list[Tensor], plain: bool, retain: bool) -> bool:
        """A backward pass begins: where it goes through defended records, make their release in its place."""
        if self.per_record is None or not self.handles or not self.per_record.of(roots):
            return False
        if not plain:
            raise DefenseError(
                "A backward pass through a guarded model was given gradients, inputs or create_graph. Records are "
                "kept apart in a plain loss.backward() only."
            )
        self.provenance.tie()
        weights: Params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._check_origin(gradients_of(weights))
        with nullcontext() if self.per_record.watched.all_known else lifted(self.handles):  # else parts run again
            left = self.per_record.release(roots, retain, weights, self.rng, self.report)
        self.provenance.take(left)
        for p in weights.values():
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):  # as a backward pass would
                hook(p)
        return True

    def begin_step(self, optimizer: Optimizer) -> None:
        """The weights must be those that the last step left."""
        self.provenance.tie()  # before asking which it holds
        self.provenance.begin()
        self.held = self.provenance.held_by(optimizer)
        self.check_weights(self.held)
        if self.held and self.per_record is not None:
            check_state(optimizer, self._trained())
        self.stepping = bool(self.held)

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready: make sure that they are defended, and defend them where that is done here."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not (gradient := gradients_of(self.provenance.named(held))):
            return
        self.report.optimizer_steps += 1
        if self.in_passes or self.per_record is not None:
            self._check_origin(gradient)
        if "gradient" in self.acts_on:
            self._defend_gradient(optimizer, gradient)
        if self.per_record is not None:
            self.per_record.stepped()

    def after_step(self, optimizer: Optimizer) -> None:
        """The weights are what the optimizer made of defended gradients."""
        self.stepping = False
        for part in self.held:
            part.account()
        if self.held and self.per_record is not None:
            note_state(optimizer, self._trained())

    def _defend_gradient(self, optimizer: Optimizer, gradient: Params) -> None:
        if is_stamped(gradient, self.stamps.get(optimizer)):  # a second step on the same
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            raise DefenseError(
                "The gradient is still multiplied by GradScaler's factor here (a fused optimizer divides later). Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        with own_draws(self.defense):
            changed = self.defense.on_gradient(copied(gradient), self.rng)
        if changed.keys() != gradient.keys():
            raise DefenseError(f"{self.defense.spec_name!r} changed the names in the gradient. It must keep them all.")
        if is_same(changed, gradient):
            self.undefended(left_as_it_was(self.defense, "gradient"))
        else:
            overwrite(gradient, changed)
            if not self.in_passes and self.per_record is None:
                self.report.steps += 1
        self.provenance.take(gradient if self.per_record is None else copied(gradient))
        self.stamps[optimizer] = stamp(gradient, changed)

    def _trained(self) -> Params:
        return {name: trace.p for name, trace in self.provenance.by_name.items() if trace.p.requires_grad}

    @property
    def without_noise(self) -> list[str]:
        """Weights whose gradients are there, under a defence of records, and were not made by it."""
        if not self.handles or self.per_record is None:
            return self.bare
        self.provenance.tie()
        gradients = gradients_of(dict(self.model.named_parameters()))
        old = [n for n, g in gradients.items() if n in self.stale and torch.equal(Bits([g]).sum(), self.stale[n])]
        return [name for name in self._foreign(gradients) if name not in old]

    def _foreign(self, gradient: Params) -> list[str]:
        if self.per_record is None:
            return self.provenance.foreign(gradient)
        trained = self._trained()
        if self.per_record.holds(trained) and gradient.keys() <= trained.keys():
            return []
        foreign = self.provenance.foreign(gradient) + [name for name in gradient if name not in trained]
        if self.stepping and not foreign:
            self.provenance.take(copied(gradient))  # limited, or with a penalty: as they are now
        return foreign

    def _check_origin(self, gradient: Params) -> None:
        """Refuse a step whose gradient did not come through the defence."""
        foreign = self._foreign(gradient)
        if not foreign:
            return
        if any(name in self.provenance.by_name and self.provenance.by_name[name].known for name in foreign):
            self.undefended(
                f"The gradient of {', '.join(foreign[:3])} is not what defended passes left there: it was replaced, "
                f"added to, or changed by more than a factor or a limit on its entries. Leave gradients to backward(): "
                f"clipping, scaling and weight decay are fine; noise goes into the defence "
                f"({describe(self.defense)}+gaussian)."
            )
        else:
            self.undefended(
                "The optimizer is about to use a gradient that went through no defended pass. Call the model in train "
                "mode as model(x) or guard(x), clear gradients from before the guard with optimizer.zero_grad(), and "
                "give protect() the compiled model where it was compiled first."
            )

    def undefended(self, message: str) -> None:
        """Raise where the guard is strict, else count it."""
        self.stepping = False
        if self.strict:
            raise DefenseError(message)
        self.report.skipped += 1


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return the defence that hooks in this model, or in a part of it, belong to."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
            if isinstance(hook, Hook):
                return hook.attachment
    return None


def _checksum(model: nn.Module) -> int:
    return int(Bits(model.parameters()).sum()) if any(True for _ in model.parameters()) else 0
