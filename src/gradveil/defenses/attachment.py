"""A defence attached to a model: its hooks, and what it does when an optimizer is about to step."""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import Generator, nn
from torch.optim import Optimizer

from gradveil.defenses import optimizers
from gradveil.defenses.base import Defense
from gradveil.defenses.hooks import Enter, Interceptor, Leave, Substitute
from gradveil.defenses.substitution import check_layer, weight_name
from gradveil.errors import DefenseError
from gradveil.tree import Params

Stamp = dict[str, tuple[int, int]]  # name -> which gradient tensor, and how often it was written


class Attachment(Interceptor):
    """Hooks on the model and an ear on its optimizers, until it is detached."""

    def __init__(self, model: nn.Module, defense: Defense, rng: Generator | None, strict: bool) -> None:
        super().__init__(model, defense, rng, strict)
        self.versions: dict[str, int] | None = _versions(model)  # of a copy unknown: it is made in the middle
        self._forget()

    def _forget(self) -> None:
        self.stamps: WeakKeyDictionary[Optimizer, Stamp] = WeakKeyDictionary()
        self.passes_at: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"stamps": None, "passes_at": None, "versions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        if self.handles:
            optimizers.listen(self)

    def attach(self) -> None:
        """Register the hooks."""
        for layer in self.layers:
            check_layer(self.model, layer)
        self.handles.append(self.model.register_forward_pre_hook(Enter(self), with_kwargs=True))
        for layer in self.layers:
            target = self.model.get_submodule(layer)
            self.handles.append(target.register_forward_hook(Substitute(self, layer)))
        self.handles.append(self.model.register_forward_hook(Leave(self), always_call=True))
        optimizers.listen(self)

    def detach(self) -> None:
        """Remove every hook; once is enough."""
        while self.handles:
            self.handles.pop().remove()
        optimizers.stop(self)

    @property
    def weights_changed(self) -> bool:
        """Whether something wrote to the model's weights since the defence was attached."""
        return self.versions is not None and _versions(self.model) != self.versions

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready: make sure that they are defended, and defend them where that is done here."""
        gradient = self._gradient_in(optimizer)
        if not gradient:
            return
        self.report.optimizer_steps += 1
        if _stamp(gradient) == self.stamps.get(optimizer):
            return  # no backward pass since the last step: these were defended then
        if self.in_passes:
            self._check_passes(optimizer, gradient)
        if "gradient" in self.defense.acts_on:
            self._defend_gradient(optimizer, gradient)
        self.stamps[optimizer] = _stamp(gradient)

    def _gradient_in(self, optimizer: Optimizer) -> Params:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if id(p) in held and p.grad is not None}

    def _check_passes(self, optimizer: Optimizer, gradient: Params) -> None:
        """Refuse a step whose gradient came from no defended pass."""
        weights = {weight_name(layer) for layer in self.layers} or set(gradient)
        if self.passes == self.passes_at.get(optimizer, 0) and weights & set(gradient):
            self._undefended(
                "The optimizer is about to use a gradient that went through no defended pass. Call the model in train "
                "mode as model(x) or guard(x), clear gradients from before the guard with optimizer.zero_grad(), and "
                "give protect() the compiled model where it was compiled first."
            )
        self.passes_at[optimizer] = self.passes

    def _defend_gradient(self, optimizer: Optimizer, gradient: Params) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise DefenseError(
                "The gradient is still multiplied by GradScaler's factor here (a fused optimizer divides later). Call "
                "scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        changed = self.defense.on_gradient({name: g.detach().clone() for name, g in gradient.items()}, self.rng)
        if changed.keys() != gradient.keys():
            raise DefenseError(f"{self.defense.spec_name!r} changed the names in the gradient. It must keep them all.")
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


def _versions(model: nn.Module) -> dict[str, int]:
    return {name: p._version for name, p in model.named_parameters()}


def _stamp(gradient: Params) -> Stamp:
    return {name: (id(g), g._version) for name, g in gradient.items()}
