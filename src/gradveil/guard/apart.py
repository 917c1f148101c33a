"""Whether a backward pass keeps records apart: hooks and functions of a model may mix what the loss does not."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradveil.errors import DefenseError

_MIXED = (
    "In the backward pass the gradient of a record depends on the others of its batch (a backward hook, or a function "
    "with a backward of its own): no record can be clipped by itself. Leave the hook out; limit gradients after it."
)


def check_hooks(gave: Iterable[Tensor]) -> None:
    """Raise where somebody put a hook on what the model gave: what it makes of all records' gradients is unknown."""
    if any(t._backward_hooks for t in gave):
        raise DefenseError(f"There is a hook on the model's output. {_MIXED}")


def check_backward(
    loss: Tensor,
    edges: Sequence[GradientEdge],
    deltas: Sequence[Tensor | None],
    nodes: Iterable[Node],
    count: int,
    *,
    retain: bool,
) -> None:
    """Raise where half of the records get other gradients when those of the other half are zero on the way."""
    if count < 2:
        return
    for half, last in ((slice(0, count // 2), False), (slice(count // 2, count), True)):
        handles = [node.register_prehook(_kept(half, count)) for node in nodes]
        try:
            found = torch.autograd.grad(loss, edges, retain_graph=retain or not last, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for own, alone in zip(deltas, found, strict=True):
            if own is None or alone is None or own.shape[:1] != (count,):
                continue
            apart = (own[half] - alone[half]).abs().max() if own.numel() else torch.zeros(())
            if bool(apart > 1e-3 * own.abs().max()):
                raise DefenseError(_MIXED)


def _kept(half: slice, count: int) -> Callable[..., Any]:
    """Return a hook that keeps half of the rows of what it gets."""

    def keep(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(_half(g, half) if g is not None and g.shape[:1] == (count,) else g for g in grads)

    return keep


def _half(g: Tensor, half: slice) -> Tensor:
    kept = torch.zeros_like(g)
    kept[half] = g[half]
    return kept
