"""Tell guards when an optimizer is about to step on their model's weights."""

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """What is told of a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready, the step is not yet taken."""


_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()
_handles: list[RemovableHandle] = []


def listen(listener: Listener) -> None:
    """Call ``listener.before_step`` from now on; the listener is not kept alive by this."""
    _listeners.add(listener)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_on_step))


def stop(listener: Listener) -> None:
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
