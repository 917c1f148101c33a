"""Where a defence gets its turn in the steps of optimizers."""

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Listener(Protocol):
    """What is told of a step."""

    def begin_step(self, optimizer: Optimizer) -> None:
        """A step begins; nothing is changed yet."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Gradients are ready, the step is not yet taken."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The step is taken."""


_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()
_handles: list[RemovableHandle] = []
_last: "weakref.WeakKeyDictionary[Optimizer, RemovableHandle]" = weakref.WeakKeyDictionary()


def watch_optimizers(listener: Listener) -> None:
    """Tell the listener of every step from now on; it is not kept alive by this."""
    _listeners.add(listener)
    if not _handles:
        _handles.extend([register_optimizer_step_pre_hook(_on_step), register_optimizer_step_post_hook(_after_step)])


def unwatch_optimizers(listener: Listener) -> None:
    """Tell this listener no more; the hooks go with the last one."""
    _listeners.discard(listener)
    while not _listeners and (_handles or _last):
        (_handles.pop() if _handles else _last.popitem()[1]).remove()


def _on_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Line up behind the hooks of the optimizer itself, which may change gradients."""
    if (handle := _last.get(optimizer)) is None:
        handle = _last[optimizer] = optimizer.register_step_pre_hook(_at_last)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id)  # type: ignore[attr-defined]


def _at_last(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell every listener now or, where a closure makes the gradients inside the step, after the closure."""
    for listener in list(_listeners):
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
    for listener in list(_listeners):
        listener.before_step(optimizer)


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for listener in list(_listeners):
        listener.after_step(optimizer)
