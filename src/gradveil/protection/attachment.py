"""Hooks of a defence on a model, on backward passes and on the optimizers that step on its weights."""

import weakref
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError
from gradveil.modules import lifted
from gradveil.protection.defense import Defense, own_draws
from gradveil.protection.forward import (
    AfterLoading,
    BeforeLoading,
    BeforeSaving,
    Enter,
    ForwardHooks,
    LayerRan,
    Leave,
    OneThread,
    PartRan,
    Substitute,
)
from gradveil.protection.passes import check_layer
from gradveil.protection.per_record_step import PerRecordStep, Stamp, alike, copied, is_stamped, stamp
from gradveil.protection.provenance import Bits, Part
from gradveil.registry import describe
from gradveil.tree import Params

_before_backward: "weakref.WeakSet[Attachment]" = weakref.WeakSet()
_own: Any = torch.autograd.backward


def watch_backward(listener: "Attachment") -> None:
    """Ask the listener before every backward pass from now on; it is not kept alive by this."""
    _before_backward.add(listener)
    torch.autograd.backward = _watched


def unwatch_backward(listener: "Attachment") -> None:
    """Ask this listener no more; torch is as it was after the last one."""
    _before_backward.discard(listener)
    if not _before_backward:
        torch.autograd.backward = _own


def _watched(
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
    if not any(listener.take_backward(roots, plain, retain) for listener in list(_before_backward)):
        _own(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


_at_steps: "weakref.WeakSet[Attachment]" = weakref.WeakSet()
_handles: list[RemovableHandle] = []
_last: "weakref.WeakKeyDictionary[Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


def watch_optimizers(listener: "Attachment") -> None:
    """Tell the listener of every step from now on; it is not kept alive by this."""
    _at_steps.add(listener)
    if not _handles:
        _handles.extend([register_optimizer_step_pre_hook(_on_step), register_optimizer_step_post_hook(_after_step)])


def unwatch_optimizers(listener: "Attachment") -> None:
    """Tell this listener no more; the hooks go with the last one."""
    _at_steps.discard(listener)
    while not _at_steps and (_handles or _last):
        (_handles.pop() if _handles else _last.popitem()[1]).remove()


def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (handle := _last.get(optimizer)) is None:
        handle = _last[optimizer] = optimizer.register_step_pre_hook(_at_last)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def _at_last(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell every listener now or, where a closure makes the gradients inside the step, after the closure."""
    for listener in list(_at_steps):
        listener.begin_step(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _tell(optimizer)
        return None

    def then_tell() -> Any:
        value = closure()
        _tell(optimizer)
        return value

    return (
        (args[:1], kwargs | {"closure": then_tell})
        if "closure" in kwargs
        else ((args[0], then_tell, *args[2:]), kwargs)
    )


def _tell(optimizer: Optimizer) -> None:
    for listener in list(_at_steps):
        listener.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in list(_at_steps):
        listener.after_step(optimizer)


_noted: "WeakKeyDictionary[Optimizer, list[tuple[Tensor, int]]]" = WeakKeyDictionary()  # and how often written to


def _state(optimizer: Optimizer, weights: Params) -> list[tuple[str, Tensor]]:
    """Return what an optimizer keeps of the gradients of some weights, by the weights' names."""
    own = ((name, optimizer.state[p]) for name, p in weights.items() if p in optimizer.state)
    return [(name, t) for name, kept in own for t in tree_leaves(kept) if isinstance(t, Tensor)]


def note_state(optimizer: Optimizer, weights: Params) -> None:
    """A step on defended gradients was taken, from nothing or from the state of such steps."""
    _noted[optimizer] = [(t, t._version) for _, t in _state(optimizer, weights)]


def check_state(optimizer: Optimizer, weights: Params) -> None:
    """Raise where an optimizer holds anything that steps under a guard of records did not leave there."""
    known = {id(t): version for t, version in _noted.get(optimizer, [])}
    if odd := [name for name, t in _state(optimizer, weights) if known.get(id(t)) != t._version]:
        raise DefenseError(
            f"The optimizer's state for {odd[0]!r} was not left by steps under this defence (it is from before the "
            f"guard, or was loaded or changed), and may hold gradients without noise. Make a new optimizer, or call "
            f"optimizer.state.clear()."
        )


class Attachment(ForwardHooks):
    """Hooks on the model and an ear on its optimizers, until it is detached."""

    def __init__(
        self,
        model: nn.Module,
        defense: Defense,
        simulated: Generator | None,
        strict: bool,
        per_record: PerRecordStep | None = None,
    ) -> None:
        super().__init__(model, defense, simulated, strict)
        self.per_record = per_record
        self.at_start: int | None = _checksum(model)  # of a copy unknown: it is made in the middle
        self.stamps: WeakKeyDictionary[Optimizer, Stamp] = WeakKeyDictionary()
        self.held: list[Part] = []  # by the optimizer that is at work
        self.past = False  # at the end: whether weights were changed past the defence
        self.stale: Params = {}  # checksums of gradients from before the guard, which no step may use
        self.bare: list[str] = []  # at the end: weights whose gradients are there without their noise
        self.alone = OneThread()
        self.keeper: RemovableHandle | None = None  # its hook, which stays where the others are lifted

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stamps": None, "at_start": None, "past": False, "bare": [], "held": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.stamps = WeakKeyDictionary()
        if self.handles:
            self._watch()

    def attach(self) -> None:
        for layer in self.layers:
            check_layer(self.model, layer)
        self.keeper = self.model.register_forward_pre_hook(self.alone, prepend=True)
        self.handles.append(self.model.register_forward_pre_hook(Enter(self), with_kwargs=True))
        for layer in self.layers:
            target = self.model.get_submodule(layer)
            self.handles.append(target.register_forward_hook(Substitute(self, layer), prepend=True, with_kwargs=True))
        for layer in self.per_record.watched.layers if self.per_record is not None else ():
            target = self.model.get_submodule(layer)
            self.handles.append(target.register_forward_hook(LayerRan(self, layer), prepend=True, with_kwargs=True))
        for part in self.model.modules():
            if self.provenance.owned_by(part) or self.per_record is not None:
                self.handles.append(part.register_load_state_dict_pre_hook(BeforeLoading(self)))
                self.handles.append(part.register_load_state_dict_post_hook(AfterLoading(self)))
                if self.provenance.has_passes and part is not self.model:
                    self.handles.append(part.register_forward_hook(PartRan(self)))
        self.handles.append(self.model.register_forward_hook(Leave(self), always_call=True))
        if self.per_record is not None:
            self.handles.append(self.model.register_state_dict_pre_hook(BeforeSaving(self)))
            self.stale = {name: Bits([g]).sum() for name, g in self._gradients().items()}
        self._watch()

    def _watch(self) -> None:
        watch_optimizers(self)
        if self.per_record is not None:
            watch_backward(self)

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
        unwatch_optimizers(self)
        unwatch_backward(self)

    def leave(self, output: Any) -> None:
        if self.alone.is_mine:
            try:
                super().leave(output)
            finally:
                self.alone.release()

    @property
    def went_past(self) -> bool:
        """Whether weights were changed past the defence since the last step, or before it was detached."""
        if self.handles:
            self.provenance.tie()
            return bool(self.provenance.moved_past(self.provenance.parts))
        return self.past

    @property
    def without_noise(self) -> list[str]:
        """Weights whose gradients are there, under a defence of records, and were not made by it."""
        if not self.handles or self.per_record is None:
            return self.bare
        self.provenance.tie()
        gradients = self._gradients()
        old = [n for n, g in gradients.items() if n in self.stale and torch.equal(Bits([g]).sum(), self.stale[n])]
        return [name for name in self._foreign(gradients) if name not in old]

    def _gradients(self) -> Params:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    @property
    def weights_changed(self) -> bool:
        """Whether the model's weights are others than when the defence was attached."""
        return self.at_start is not None and _checksum(self.model) != self.at_start

    def begin_step(self, optimizer: Optimizer) -> None:
        """The weights must be those that the last step left."""
        self.provenance.tie()  # before asking which it holds
        self.provenance.begin()
        self.held = self.provenance.held_by(optimizer)
        self.check_weights(self.held)
        if self.held and self.per_record is not None:
            check_state(optimizer, self._trained())
        self.stepping = bool(self.held)

    def after_step(self, optimizer: Optimizer) -> None:
        """The weights are what the optimizer made of defended gradients."""
        self.stepping = False
        for part in self.held:
            part.account()
        if self.held and self.per_record is not None:
            self.per_record.stepped()
            note_state(optimizer, self._trained())

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
        self._check_origin({name: p.grad for name, p in weights.items() if p.grad is not None})
        with lifted(self.handles):
            self.per_record.release(roots, retain, weights, self.rng, self.report)
        assert self.per_record.left is not None
        self.provenance.take(self.per_record.left.parts)
        for p in weights.values():
            for hook in list((p._post_accumulate_grad_hooks or {}).values()):  # as a backward pass would
                hook(p)
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready: make sure that they are defended, and defend them where that is done here."""
        gradient = self._gradient_in(optimizer)
        if not gradient:
            return
        self.report.optimizer_steps += 1
        if self.in_passes or self.per_record is not None:
            self._check_origin(gradient)
        if "gradient" in self.acts_on and not is_stamped(gradient, self.stamps.get(optimizer)):
            changed = self._defend_gradient(optimizer, gradient)
            self.provenance.take(gradient if self.per_record is None else copied(gradient))
            self.stamps[optimizer] = stamp(gradient, changed)

    def _gradient_in(self, optimizer: Optimizer) -> Params:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p.grad for name, p in self.provenance.named(held).items() if p.grad is not None}

    def _trained(self) -> Params:
        return {name: trace.p for name, trace in self.provenance.by_name.items() if trace.p.requires_grad}

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

    def _defend_gradient(self, optimizer: Optimizer, gradient: Params) -> Params:
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
            return changed
        if alike(gradient):
            torch._foreach_copy_([g.detach() for g in gradient.values()], [changed[name] for name in gradient])
        else:
            for name, g in gradient.items():
                g.detach().copy_(changed[name])
        if not self.in_passes and self.per_record is None:
            self.report.steps += 1
        return changed


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return the defence that hooks in this model, or in a part of it, belong to."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
            if isinstance(hook, (Enter, Substitute, Leave)) and isinstance(hook.hooks, Attachment):
                return hook.hooks
    return None


def refuse_opacus(model: nn.Module) -> None:
    """Raise where Opacus has hooked or wrapped the model: its per-example gradients would not be ours."""
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values(), *module._backward_hooks.values()]
        if any(_origin(thing).startswith("opacus") for thing in [type(module), *hooks]):
            raise DefenseError(
                f"Opacus is at work on {name or type(module).__name__!r}: it computes gradients per example by hooks "
                f"of its own, and the two cannot share a model. Pick one: protect the plain module, or keep Opacus."
            )


def _origin(thing: Any) -> str:
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _checksum(model: nn.Module) -> int:
    return int(Bits(model.parameters()).sum()) if any(True for _ in model.parameters()) else 0


def is_same(changed: Params, before: Params) -> bool:
    """Whether a defence left everything as it was, though there was something to change."""
    return all(torch.equal(changed[name], g) for name, g in before.items()) and any(g.any() for g in before.values())


def left_as_it_was(defense: Defense, what: str) -> str:
    """Return what to say of a defence that did nothing."""
    return f"{describe(defense)} left the {what} as it was, so nothing is defended. Give it more to change."
