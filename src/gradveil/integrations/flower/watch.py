"""Find the model that a client trains, from outside its code."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from torch import nn

from gradveil.tree import Params

_open: "list[ModelWatch]" = []
_lock = threading.Lock()
_plain_call: Any = nn.Module.__call__


class ModelWatch:
    """While it is open, tells of each module that is called for the first time and has the weights that were sent.

    It is told *before* the call, with the arguments, so that hooks put on the module then see this very pass. (A
    global forward pre-hook of torch comes too late for that: the module's own hooks are listed by then, and the
    keyword arguments are hidden from it.) Only the thread that opened the watch is watched, so that two clients in
    one process are not mixed up. A client that trains in a thread of its own, or through ``model.forward``, is
    not found.
    """

    def __init__(self, weights: Params, found: Callable[[nn.Module], None]) -> None:
        self._weights = weights
        self._found = found
        self._seen: dict[int, tuple[nn.Module, bool]] = {}  # by id; the reference keeps the id from being used again
        self._inside = False  # a call of a model that was found is under way: its parts are no models
        self._thread = threading.get_ident()

    def __enter__(self) -> "ModelWatch":
        with _lock:
            _open.append(self)
            nn.Module.__call__ = _watched_call  # type: ignore[method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            _open.remove(self)
            if not _open:
                nn.Module.__call__ = _plain_call  # type: ignore[method-assign]
        self._seen.clear()

    @contextmanager
    def call(self, module: nn.Module) -> Iterator[None]:
        """Take note of a module that is about to be called."""
        if self._inside or threading.get_ident() != self._thread:
            yield
            return
        if id(module) not in self._seen:
            fits = named_as_in(module, self._weights) is not None
            self._seen[id(module)] = (module, fits)
            if fits:
                self._found(module)
        self._inside = self._seen[id(module)][1]
        try:
            yield
        finally:
            self._inside = False


def named_as_in(module: nn.Module, weights: Params) -> Params | None:
    """Return weights that a server sent under the module's own names; None where they are not its weights.

    They are where the names are those of its state dict. Flower's older clients number the arrays instead, in the
    order of the state dict: there the shapes must be the same.
    """
    own = module.state_dict()
    if own.keys() == weights.keys():
        return weights
    numbered = list(weights) == [str(i) for i in range(len(own))]
    if numbered and [v.shape for v in own.values()] == [v.shape for v in weights.values()]:
        return dict(zip(own, weights.values(), strict=True))
    return None


def _watched_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for watch in tuple(_open):
            stack.enter_context(watch.call(module))
        return _plain_call(module, *args, **kwargs)
