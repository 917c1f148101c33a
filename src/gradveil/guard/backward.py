"""Where a defence gets its turn in backward passes: in place of them, so that no plain gradient is left behind."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor


class BackwardListener(Protocol):
    """What is asked before a backward pass."""

    def take_backward(self, roots: list[Tensor], plain: bool, retain: bool) -> bool:
        """Do what is to be done for these roots and return True, or False where they do not concern it.

        ``plain``: nothing beside the roots and ``retain`` was given.
        """


_listeners: "weakref.WeakSet[BackwardListener]" = weakref.WeakSet()
_own: Any = torch.autograd.backward


def watch_backward(listener: BackwardListener) -> None:
    """Ask the listener before every backward pass from now on; it is not kept alive by this."""
    _listeners.add(listener)
    torch.autograd.backward = _watched


def unwatch_backward(listener: BackwardListener) -> None:
    """Ask this listener no more; torch is as it was after the last one."""
    _listeners.discard(listener)
    if not _listeners:
        torch.autograd.backward = _own


def _watched(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``, where no listener takes it."""
    roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
    plain = grad_tensors is None and grad_variables is None and inputs is None and not create_graph
    retain = create_graph if retain_graph is None else retain_graph
    if not any(listener.take_backward(roots, plain, retain) for listener in list(_listeners)):
        _own(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
