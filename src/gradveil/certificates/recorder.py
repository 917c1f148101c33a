"""Write down what a forward pass does to its input, operation by operation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.certificates.stages import Shape
from gradveil.errors import CertificateError

HERE = object()  # stands for the tensor that depends on the input


@dataclass(frozen=True)
class Node:
    """One operation on a tensor that depends on the input."""

    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parents: tuple["Node", ...]
    in_shape: Shape
    out_shape: Shape
    batch_kept: bool


class Recorder(TorchDispatchMode):
    """Write down every operation on tensors that depend on ``x``."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._kept: list[Tensor] = [x]  # alive, so that no id is used twice
        shape = tuple(x.shape[1:])
        self._nodes = {id(x): Node("input", (), {}, (), shape, shape, True)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = [a for a in _tensors(args) if id(a) in self._nodes]
        parents = tuple(self._nodes[id(a)] for a in used)
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if used and isinstance(first, Tensor):
            name = func.overloadpacket.__name__.removesuffix("_")
            at = tuple(HERE if any(a is u for u in used) else a for a in args)
            kept = first.ndim > 0 and used[0].ndim > 0 and len(first) == len(used[0])
            node = Node(name, at, kwargs or {}, parents, tuple(used[0].shape[1:]), tuple(first.shape[1:]), kept)
            self._kept.append(first)
            self._nodes[id(first)] = node
        return out

    def path(self, r: Tensor) -> list[Node]:
        """Return the operations that lead from the input to r, in order."""
        if id(r) not in self._nodes:
            raise CertificateError(
                "What the layer is fed does not depend on the input, so there is nothing to certify."
            )
        node, found = self._nodes[id(r)], []
        while node.parents:
            if len(node.parents) > 1:
                raise CertificateError(
                    f"The part before the layer is not a chain: {node.operation!r} joins two paths from the input "
                    "(a residual connection or a product). Certify a layer before it, or use kind='local'."
                )
            found.append(node)
            node = node.parents[0]
        return found[::-1]


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    nested = (a for arg in args for a in (arg if isinstance(arg, tuple | list) else [arg]))
    return [a for a in nested if isinstance(a, Tensor)]
