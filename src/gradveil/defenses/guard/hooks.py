"""Where a defence gets its turn: in the forward passes of a model, and before an optimizer steps on its weights."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gradveil.defenses.base import Defense
from gradveil.defenses.guard.passes import OneInput, Pass, Report, find_input, with_input
from gradveil.defenses.guard.step import substitute
from gradveil.errors import DefenseError
from gradveil.types import Batch


class Listener(Protocol):
    """What is told of a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready, the step is not yet taken."""


_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def watch_optimizers(listener: Listener) -> None:
    """Call ``listener.before_step`` from now on; the listener is not kept alive by this."""
    _listeners.add(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_on_step))


def unwatch_optimizers(listener: Listener) -> None:
    """Tell this listener no more; the hook goes with the last one."""
    _listeners.discard(listener)
    while _handles and not _listeners:
        _handles.pop().remove()


def _on_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell every listener now or, where a closure makes the gradients inside the step, after the closure."""
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
    for listener in list(_listeners):
        listener.before_step(optimizer)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Interceptor:
    """Puts r' in place of r in the weight gradients of a model's defended layers, pass by pass."""

    def __init__(self, model: nn.Module, defense: Defense, rng: Generator | None, strict: bool) -> None:
        self.model, self.defense, self.strict = model, defense, strict
        self.layers = defense.layers(model)
        self.in_passes = bool(defense.acts_on & {"batch", "representation"})
        self.given_rng = rng
        self.rng = _fresh_rng() if rng is None else rng
        self.report = Report()
        self.passes = 0  # training passes that were defended
        self.current: Pass | None = None
        self.handles: list[RemovableHandle] = []
        stay_out_of_compiled_graphs()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the private: the pass under way. Leave out what belongs to this object alone: the counts."""
        return self.__dict__ | {"current": None, "passes": 0, "report": Report(), "rng": self.given_rng}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.rng is None:  # never the same noise twice: a server could subtract it
            self.rng = _fresh_rng()
        stay_out_of_compiled_graphs()

    @property
    def on(self) -> bool:
        """Whether to act: attached (compiled code may keep hooks that are gone), in train mode, with gradients."""
        return bool(self.handles) and self.model.training and torch.is_grad_enabled()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """A pass begins: note its inputs; return the arguments where the defence changes the batch."""
        self.current = None
        if not (self.on and self.in_passes):
            return None
        at = find_input(args, kwargs)
        x = args[at] if isinstance(at, int) else kwargs[at]
        changed = None
        if "batch" in self.defense.acts_on:
            x = self._changed_inputs(x)
            args, kwargs = changed = with_input(args, kwargs, at, x)
        model = self.model if len(args) == 1 and not kwargs else OneInput(self.model, args, kwargs, at)
        self.current = Pass(model, x)
        return changed

    def _changed_inputs(self, x: Tensor) -> Tensor:
        """Return the examples as the defence changes them. A guard does not see labels: they are given as -1."""
        labels = torch.full((len(x),), -1)
        batch = self.defense.on_batch(Batch(x, labels), self.rng)
        if batch.inputs.shape != x.shape or not torch.equal(batch.labels, labels):
            raise DefenseError(
                f"{self.defense.spec_name!r} changes labels or the number of examples, and a guard sees the model's "
                f"inputs only. Use gradveil.defenses.guard.step.step_gradient in your loop instead."
            )
        return batch.inputs

    def defended_output(self, layer: str, module: nn.Module, r: Tensor) -> Tensor | None:
        """A defended layer has run: return its output with the weight gradient built from r'."""
        if not self.on:
            return None
        if self.current is None:
            self._undefended(
                f"Layer {layer!r} ran outside the model's own call, so the input that belongs to it is unknown. Call "
                f"model(x), not model.forward(x) or a part of the model; activation checkpointing does this as well."
            )
            return None
        if layer in self.current.reached:
            raise DefenseError(f"Layer {layer!r} runs twice in one pass; its two inputs cannot be told apart.")
        self.current.reached.add(layer)
        return substitute(
            module, r, self.current.perturbed(self.defense, layer, r, self.rng, self.report, self.handles)
        )

    def leave(self, output: Any) -> None:
        """A pass is over: count it. Without an output it was broken off by an error."""
        current, self.current = self.current, None
        if current is None or output is None:
            return
        if self.layers and not current.reached:
            self._undefended(
                f"A training pass did not run {', '.join(self.layers)} as a layer, so nothing was defended. Is the "
                f"weight used directly, as in F.linear(x, layer.weight)?"
            )
            return
        self.passes += 1
        self.report.steps += 1
        self.report.examples += len(current.x)

    def _undefended(self, message: str) -> None:
        if self.strict:
            raise DefenseError(message)
        self.report.skipped += 1


def _fresh_rng() -> Generator:
    rng = Generator()
    rng.seed()
    return rng


@dataclass(eq=False)
class Enter:
    """Before the model's forward pass."""

    interceptor: Interceptor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the pass, and change its batch where the defence does."""
        return _call(self.interceptor.enter, args, kwargs)


@dataclass(eq=False)
class Substitute:
    """After a defended layer's forward pass."""

    interceptor: Interceptor
    layer: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the output that carries the defended weight gradient."""
        return _call(self.interceptor.defended_output, self.layer, module, args[0])


@dataclass(eq=False)
class Leave:
    """After the model's forward pass, also a broken one."""

    interceptor: Interceptor

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Count the pass."""
        _call(self.interceptor.leave, output)


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


_call: Callable[..., Any] = _plainly


def stay_out_of_compiled_graphs() -> None:
    """Make hooks run as plain Python inside torch.compile; here, since importing the compiler takes a second."""
    global _call
    if _call is _plainly:
        _call = torch.compiler.disable(_plainly)
