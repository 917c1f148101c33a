"""``protect``: a defence attached to a model's training, which refuses a step that would go out undefended."""

from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Generator, nn
from torch.optim import Optimizer

from gradveil.defenses.base import Defense, build
from gradveil.defenses.guard.hooks import Enter, Interceptor, Leave, Substitute, unwatch_optimizers, watch_optimizers
from gradveil.defenses.guard.passes import Report
from gradveil.defenses.guard.step import check_layer, weight_name
from gradveil.errors import DefenseError, UpdateError
from gradveil.registry import describe
from gradveil.tree import Params
from gradveil.types import Update

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
            watch_optimizers(self)

    def attach(self) -> None:
        """Register the hooks."""
        for layer in self.layers:
            check_layer(self.model, layer)
        self.handles.append(self.model.register_forward_pre_hook(Enter(self), with_kwargs=True))
        for layer in self.layers:
            target = self.model.get_submodule(layer)
            self.handles.append(target.register_forward_hook(Substitute(self, layer)))
        self.handles.append(self.model.register_forward_hook(Leave(self), always_call=True))
        watch_optimizers(self)

    def detach(self) -> None:
        """Remove every hook; once is enough."""
        while self.handles:
            self.handles.pop().remove()
        unwatch_optimizers(self)

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


class Guard:
    """A defended model: call it in place of the model, leave it (``with``) or ``remove`` it when training is over."""

    def __init__(self, attachment: Attachment, model: nn.Module) -> None:
        self._attachment = attachment
        self.model = model  # as it was given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.model(*args, **kwargs)

    def __enter__(self) -> "Guard":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove() if kind is not None else self.close()

    @property
    def defense(self) -> Defense:
        """The defence at work."""
        return self._attachment.defense

    @property
    def report(self) -> Report:
        """What was done so far: steps, entries asked for and removed, distances."""
        return self._attachment.report

    def remove(self) -> None:
        """Take every hook off the model again. Checks nothing: see ``check``."""
        self._attachment.detach()

    def close(self) -> None:
        """Take every hook off, and raise ``DefenseError`` where a strict guard saw training but defended none of it."""
        self.remove()
        if self._attachment.strict:
            self._check_attempts()

    def check(self) -> None:
        """Raise ``DefenseError`` unless something was defended; for callers that have trained and are about to send."""
        needed = self.defense.acts_on
        if needed - {"update"} and not self.report.steps:
            raise DefenseError(self._nothing_done())
        self._check_update(needed)

    def _check_attempts(self) -> None:
        """Raise where training took place and the defence did not."""
        tried = self.report.optimizer_steps > 0 or self._attachment.weights_changed
        needed = self.defense.acts_on
        if tried and needed - {"update"} and not self.report.steps:
            raise DefenseError(self._nothing_done())
        if tried:
            self._check_update(needed)

    def _check_update(self, needed: frozenset[str]) -> None:
        if "update" in needed and not self.report.updates:
            raise DefenseError(
                f"{describe(self.defense)} acts on the update, and no update passed through it. Send what "
                f"guard.update(before, after) returns, called while the guard is on."
            )

    def _nothing_done(self) -> str:
        where = "model(x) or guard(x) in train mode" if self._attachment.in_passes else "a torch optimizer"
        return (
            f"No training step was defended by {describe(self.defense)} ({self.report.optimizer_steps} optimizer steps "
            f"were taken). Train through {where}, and do not send this update."
        )

    def update(
        self, before: Params, after: Params, *, lr: float = 1.0, num_examples: int = 1, num_steps: int = 1
    ) -> Params:
        """Return the weights to send in place of ``after``: the update from ``before`` to it, defended.

        Both are state dicts; entries that are not trained pass through. ``lr`` is that of the local steps: it says
        what a unit of noise on the update is.
        """
        if "update" not in self.defense.acts_on:
            return dict(after)
        names = [name for name, p in self._attachment.model.named_parameters() if p.requires_grad]
        if lost := [name for name in names if name not in before or name not in after]:
            raise UpdateError(f"{', '.join(lost)} is missing from the weights before or after. Give whole state dicts.")
        start = {name: before[name].detach() for name in names}
        update = Update.from_weights(start, after, lr, num_examples, num_steps)
        changed = self.defense.on_update(update, self._attachment.rng)
        self.report.updates += 1
        return dict(after) | {name: start[name] - lr * changed.gradient[name] for name in names}


def protect(
    model: nn.Module, defence_or_spec: Defense | str, *, rng: Generator | None = None, strict: bool = True
) -> Guard:
    """Attach a defence to a model's training: its gradients are defended from here to ``remove``.

    Acts in train mode with gradients on. A strict guard refuses a step that was not defended; one that is not
    strict counts it in ``report.skipped``. Without ``rng`` the defence's noise comes from the system's entropy;
    a generator makes it repeatable, and then a copy of the guarded model repeats its noise: give each its own.
    """
    defense = build(defence_or_spec)
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    refuse_opacus(bare)
    if bare is not model or any(m._compiled_call_impl is not None for m in bare.modules()):
        torch.compiler.reset()  # code compiled before would run on without the hooks
    if (other := attachment_of(bare)) is not None:
        raise DefenseError(
            f"This model is guarded by {describe(other.defense)} already. Remove that guard first, or join the two "
            f"with '+' in one spec."
        )
    attachment = Attachment(bare, defense, rng, strict)
    attachment.attach()
    return Guard(attachment, model)


def guard_of(model: nn.Module) -> Guard | None:
    """Return the guard of a guarded model, also of a copy or a pickle of one; ``None`` where there is none."""
    attachment = attachment_of(getattr(model, "_orig_mod", model))
    return None if attachment is None else Guard(attachment, model)
