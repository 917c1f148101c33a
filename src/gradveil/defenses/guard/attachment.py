"""A defence attached to a model and to the optimizers that step on its weights."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from gradveil.defenses.base import Defense
from gradveil.defenses.guard.hooks import (
    AfterLoading,
    BeforeLoading,
    Enter,
    Interceptor,
    Leave,
    PartRan,
    Substitute,
    some,
)
from gradveil.defenses.guard.optimizers import unwatch_optimizers, watch_optimizers
from gradveil.defenses.guard.step import check_layer
from gradveil.defenses.guard.trace import checksum
from gradveil.errors import DefenseError
from gradveil.registry import describe
from gradveil.tree import Params

Stamp = dict[str, tuple[int, int, int]]  # name -> which gradient tensor, how often it was written, its checksum


class Attachment(Interceptor):
    """Hooks on the model and an ear on its optimizers, until it is detached."""

    def __init__(self, model: nn.Module, defense: Defense, rng: Generator | None, strict: bool) -> None:
        super().__init__(model, defense, rng, strict)
        self.at_start: dict[str, Tensor] | None = _checksums(model)  # of a copy unknown: it is made in the middle
        self.stamps: WeakKeyDictionary[Optimizer, Stamp] = WeakKeyDictionary()
        self.past: str | None = None  # at the end: what to say of weights that were changed past the defence

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stamps": None, "at_start": None, "past": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.stamps = WeakKeyDictionary()
        if self.handles:
            watch_optimizers(self)

    def attach(self) -> None:
        """Register the hooks."""
        for layer in self.layers:
            check_layer(self.model, layer)
        self.handles.append(self.model.register_forward_pre_hook(Enter(self), with_kwargs=True))
        for layer in self.layers:
            target = self.model.get_submodule(layer)
            self.handles.append(target.register_forward_hook(Substitute(self, layer), prepend=True, with_kwargs=True))
        for part in self.model.modules():
            if self.traces.of(part):
                self.handles.append(part.register_load_state_dict_pre_hook(BeforeLoading(self)))
                self.handles.append(part.register_load_state_dict_post_hook(AfterLoading(self)))
                if self.traces.has_passes and part is not self.model:
                    self.handles.append(part.register_forward_hook(PartRan(self)))
        self.handles.append(self.model.register_forward_hook(Leave(self), always_call=True))
        watch_optimizers(self)

    def detach(self) -> None:
        """Look at the weights for the last time, and remove every hook; once is enough."""
        if self.handles:
            self.past = self.changed_past(self.traces.by_name)
            self.report.skipped += self.past is not None and not self.strict
            self.traces.untie()
        while self.handles:
            self.handles.pop().remove()
        unwatch_optimizers(self)

    @property
    def weights_changed(self) -> bool:
        """Whether the model's weights are others than when the defence was attached."""
        return self.at_start is not None and any(
            not torch.equal(now.cpu(), self.at_start[name].cpu()) for name, now in _checksums(self.model).items()
        )

    def begin_step(self, optimizer: Optimizer) -> None:
        """The weights must be those that the last step left."""
        self.traces.tie()  # before asking which it holds
        if held := self.traces.held_by(optimizer):
            self.check_weights(held)
            self.traces.begin()
            self.stepping = True

    def after_step(self, optimizer: Optimizer) -> None:
        """The weights are what the optimizer made of defended gradients."""
        self.stepping = False
        self.traces.account(self.traces.held_by(optimizer))

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready: make sure that they are defended, and defend them where that is done here."""
        gradient = self._gradient_in(optimizer)
        if not gradient:
            return
        self.report.optimizer_steps += 1
        if self.in_passes:
            self._check_origin(gradient)
        if "gradient" in self.defense.acts_on and not self._is_defended_already(optimizer, gradient):
            self._defend_gradient(optimizer, gradient)
            self.traces.take(gradient)
            self.stamps[optimizer] = _stamp(gradient)

    def _gradient_in(self, optimizer: Optimizer) -> Params:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if id(p) in held and p.grad is not None}

    def _check_origin(self, gradient: Params) -> None:
        """Refuse a step whose gradient did not come through the defence."""
        foreign = self.traces.foreign(gradient)
        if not foreign:
            return
        if any(self.traces.by_name[name].known for name in foreign):
            self.undefended(
                f"The gradient of {some(foreign)} is not what defended passes left there: it was replaced, added to, "
                f"or changed by more than a factor or a limit on its entries. Leave gradients to backward(): "
                f"clipping, scaling and weight decay are fine; noise goes into the defence "
                f"({describe(self.defense)}+gaussian)."
            )
        else:
            self.undefended(
                "The optimizer is about to use a gradient that went through no defended pass. Call the model in train "
                "mode as model(x) or guard(x), clear gradients from before the guard with optimizer.zero_grad(), and "
                "give protect() the compiled model where it was compiled first."
            )

    def _is_defended_already(self, optimizer: Optimizer, gradient: Params) -> bool:
        """Whether these are the gradients of the last step, with no backward pass since."""
        last = self.stamps.get(optimizer)
        same = last is not None and all(
            name in last and (id(g), g._version) == last[name][:2] for name, g in gradient.items()
        )
        return same and _stamp(gradient) == last

    def _defend_gradient(self, optimizer: Optimizer, gradient: Params) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise DefenseError(
                "The gradient is still multiplied by GradScaler's factor here (a fused optimizer divides later). Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        changed = self.defense.on_gradient({name: g.detach().clone() for name, g in gradient.items()}, self.rng)
        if changed.keys() != gradient.keys():
            raise DefenseError(f"{self.defense.spec_name!r} changed the names in the gradient. It must keep them all.")
        if is_same(changed, gradient):
            self.undefended(left_as_it_was(self.defense, "gradient"))
            return
        for name, g in gradient.items():
            g.detach().copy_(changed[name])
        if not self.in_passes:
            self.report.steps += 1


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return the defence that hooks in this model, or in a part of it, belong to."""
    for module in model.modules():
        for hook in [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]:
            if isinstance(hook, (Enter, Substitute, Leave)) and isinstance(hook.interceptor, Attachment):
                return hook.interceptor
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
    """Return the module that a class or a hook was defined in."""
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _checksums(model: nn.Module) -> dict[str, Tensor]:
    return {name: checksum(p) for name, p in model.named_parameters()}


def _stamp(gradient: Params) -> Stamp:
    return {name: (id(g), g._version, int(checksum(g))) for name, g in gradient.items()}


def is_same(changed: Params, before: Params) -> bool:
    """Whether a defence left everything as it was, though there was something to change."""
    return all(torch.equal(changed[name], g) for name, g in before.items()) and any(g.any() for g in before.values())


def left_as_it_was(defense: Defense, what: str) -> str:
    """Return what to say of a defence that did nothing."""
    return f"{describe(defense)} left the {what} as it was, so nothing is defended. Give it more to change."
