"""Hooks on a guarded model: on its forward passes, one thread at a time, and on loading and reading its weights."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradveil.errors import DefenseError
from gradveil.modules import under_transform
from gradveil.privacy.noise import SecretDraws, Source
from gradveil.protection.defense import Defense, own_draws
from gradveil.protection.passes import Examples, OfExamples, Pass, Report, substitute, weight_name, weight_of
from gradveil.protection.per_record_step import PerRecordStep
from gradveil.protection.provenance import CHANGED, Part, Provenance
from gradveil.registry import describe
from gradveil.types import Batch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ForwardHooks:
    """Puts r' in place of r in the weight gradients of a model's defended layers, pass by pass."""

    def __init__(self, model: nn.Module, defense: Defense, simulated: Generator | None, strict: bool) -> None:
        self.model, self.defense, self.strict = model, defense, strict
        self.layers, self.acts_on = defense.layers(model), defense.acts_on
        self.in_passes = bool(self.acts_on & {"batch", "representation"})
        self.per_record: PerRecordStep | None = None  # of a defence of records
        self.simulated = simulated
        self.report = self._new_report()
        self.passes = 0  # training passes that were defended
        self.current: Pass | None = None
        self.handles: list[RemovableHandle] = []
        self.stepping = False  # an optimizer is at work on the weights
        self._provenance: Provenance | None = None
        stay_out_of_compiled_graphs()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the private: the pass under way. Leave out what belongs to this object alone: the counts."""
        alone = {"current": None, "passes": 0, "report": self._new_report(), "stepping": False, "_provenance": None}
        return self.__dict__ | alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        stay_out_of_compiled_graphs()

    @property
    def rng(self) -> Source:
        """Where noise comes from: a simulation's generator, else secret, on the weights' device where it can be."""
        if self.simulated is not None:
            return self.simulated
        devices = {p.device for p in self.model.parameters() if p.is_cuda and self.defense.draws_on_device}
        return SecretDraws(devices.pop() if len(devices) == 1 else torch.device("cpu"))

    def _new_report(self) -> Report:
        return Report(noise=self.defense.noise_from(SecretDraws() if self.simulated is None else self.simulated))

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

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
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
            if not self.stepping:
                self.check_weights(self.provenance.touched())
            self.provenance.begin()
        if self.on and self.per_record is not None:
            self.per_record.enter(args, kwargs, self.handles)
        if not (self.on and self.in_passes):
            return None
        examples = Examples(args, kwargs)
        x, changed = examples.x, None
        alone = len(args) == 1 and args[0] is x and not kwargs
        if "batch" in self.acts_on:
            x, changed = self._changed_inputs(examples)
            if torch.equal(examples.x, x):
                self.undefended(f"{describe(self.defense)} left the examples as they are. Give it more to change.")
                return None
        self.current = Pass(self.model if alone else OfExamples(self.model, examples), x)
        return changed

    def _changed_inputs(self, examples: Examples) -> tuple[Tensor, Arguments]:
        """Return the examples and arguments as the defence changes them. A guard sees no labels: they are -1."""
        others = [t for t in examples.leaves if isinstance(t, Tensor) and not t.is_floating_point() and t.ndim > 1]
        if len(given := [*examples.parts.values(), *others]) > 1:
            shapes = ", ".join(str(tuple(t.shape)) for t in given)
            raise DefenseError(
                f"{self.defense.spec_name!r} changes one input, and the model was called with several ({shapes}). Join "
                f"them in one tensor, or defend the gradient instead."
            )
        x = examples.x
        labels = torch.full((len(x),), -1)
        with own_draws(self.defense):
            batch = self.defense.on_batch(Batch(x, labels), self.rng)
        if batch.inputs.shape != x.shape or not torch.equal(batch.labels, labels):
            raise DefenseError(
                f"{self.defense.spec_name!r} changes labels or the number of examples, and a guard sees the model's "
                f"inputs only. Use gradveil.step_gradient in your loop instead."
            )
        return batch.inputs, examples.arguments(batch.inputs)

    def defended_output(self, layer: str, module: nn.Module, r: Tensor) -> Tensor | None:
        """A defended layer has run: return its output with the weight gradient built from r'."""
        if not self.on:
            return None
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
        output = substitute(module, r, changed, self.provenance.carrier(weight_name(layer), weight_of(module)))
        self.current.outputs.append((module, output))
        return output

    def outside(self, output: Any) -> None:
        """A part of the model has run: outside the model's own call its output is not defended."""
        if self.current is None and self.handles and torch.is_grad_enabled():
            self.provenance.mark(output, through=self.provenance.within_defended())

    def leave(self, output: Any) -> None:
        """A pass is over: count it. Without an output it was broken off by an error."""
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
            return
        if (message := current.used_elsewhere(output)) is not None:
            self.undefended(message)
            return
        self.passes += 1
        if self.per_record is None:
            self.report.steps += 1
            self.report.examples += len(current.x)

    def check_weights(self, parts: Iterable[Part]) -> None:
        """Refuse weights that were changed past the defence; what else was done to them is accounted for."""
        if past := self.provenance.moved_past(parts):
            self.undefended(CHANGED)
            for part in past:
                part.account()

    def undefended(self, message: str) -> None:
        """Raise where the guard is strict, else count it."""
        self.stepping = False
        if self.strict:
            raise DefenseError(message)
        self.report.skipped += 1


@dataclass(eq=False)
class Enter:
    """Before the model's forward pass."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call(self.hooks.enter, args, kwargs)


@dataclass(eq=False)
class Substitute:
    """After a defended layer's forward pass."""

    hooks: ForwardHooks
    layer: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return _call(self._defended, module, args[0] if args else kwargs["input"])

    def _defended(self, module: nn.Module, r: Tensor) -> Tensor | None:
        if self.hooks.on and next(iter(module._forward_hooks.values())) is not self:
            raise DefenseError(
                f"A forward hook was put before the guard's on layer {self.layer!r}, and what it makes of the output "
                f"would be lost. Register it without prepend."
            )
        return self.hooks.defended_output(self.layer, module, r)


@dataclass(eq=False)
class LayerRan:
    """After the forward pass of a layer with weights, under a defence of records."""

    hooks: ForwardHooks
    layer: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.hooks.on and self.hooks.per_record is not None:
            _call(self.hooks.per_record.ran, self.layer, args, kwargs, output)


@dataclass(eq=False)
class Leave:
    """After the model's forward pass, also a broken one."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        _call(self.hooks.leave, output)


@dataclass(eq=False)
class PartRan:
    """After the forward pass of a part that has weights."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.hooks.current is None:
            _call(self.hooks.outside, output)


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_call: Callable[..., Any] = _plainly


def stay_out_of_compiled_graphs() -> None:
    """Make hooks run as plain Python inside torch.compile; here, since importing the compiler takes a second."""
    global _call
    if _call is _plainly:
        _call = torch.compiler.disable(_plainly)


class OneThread:
    """A hook before every pass of a model, its own looks at itself included; a copy of it begins anew."""

    def __init__(self) -> None:
        self.on = True  # code that was compiled may keep hooks that are gone
        self._at_work: dict[str, threading.Thread] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with; in the middle of another thread's pass hooks are not where they belong."""
        owner = self._at_work.get("thread")
        if self.on and owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model: it cannot be copied or saved until its pass "
                f"is over. Copy it before the threads start, or let them take turns."
            )
        return {"on": self.on, "_at_work": {}}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _call(self._take)

    def _take(self) -> None:
        if not self.on:
            return
        me = threading.current_thread()
        owner = self._at_work.setdefault("thread", me)  # looked up and set at once, whatever other threads do
        if owner is not me and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model, and {me.name!r} called it as well. Give each "
                f"thread a model and a guard of its own (copy.deepcopy, before they start), or let them take turns."
            )
        self._at_work["thread"] = me

    @property
    def is_mine(self) -> bool:
        return self._at_work.get("thread") is threading.current_thread()

    def release(self) -> None:
        self._at_work.clear()


@dataclass(eq=False)
class BeforeLoading:
    """Before ``load_state_dict`` writes to a part's weights."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self.hooks.provenance.tie()
        self.hooks.check_weights(self.hooks.provenance.of(module))
        if self.hooks.per_record is not None:
            self.hooks.per_record.before_loading(module)


@dataclass(eq=False)
class AfterLoading:
    """After ``load_state_dict`` wrote to a part's weights."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, _: Any) -> None:
        self.hooks.provenance.load(module)
        if self.hooks.per_record is not None:
            self.hooks.per_record.loaded(module)


@dataclass(eq=False)
class BeforeSaving:
    """Before the whole model's ``state_dict()`` is read, under a defence of records."""

    hooks: ForwardHooks

    def __call__(self, module: nn.Module, *_: Any) -> None:
        hooks = self.hooks
        if hooks.per_record is None or hooks.per_record.carried.looking or hooks.stepping:
            return
        hooks.provenance.tie()
        hooks.check_weights(hooks.provenance.parts)
        hooks.per_record.check_carried()
