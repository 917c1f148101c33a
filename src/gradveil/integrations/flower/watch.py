"""Find the model that a client trains, from outside its code."""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class ModelWatch:
    """While it is open, tells of each module that is called and whose state dict has the given names.

    A hook on all modules' forward pass sees the client's model when it is first called. Only the thread that
    opened the watch is watched, so that two clients in one process are not mixed up; a client that trains in a
    thread of its own, or through ``model.forward``, is not found.
    """

    def __init__(self, names: Iterable[str], found: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        self._names = set(names)
        self._found = found
        self._seen: dict[int, nn.Module] = {}  # by id; the reference keeps the id from being used again
        self._thread = threading.get_ident()

    def __enter__(self) -> "ModelWatch":
        self._handle = register_module_forward_pre_hook(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()
        self._seen.clear()

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self._seen or threading.get_ident() != self._thread:
            return
        self._seen[id(module)] = module
        if module.state_dict().keys() == self._names:
            self._found(module, args)
