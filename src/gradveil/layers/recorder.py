"""Run a model as far as a layer and write down what happens to the input."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.layers import layer_rules  # noqa: F401  (fills the table of rules)
from gradveil.layers.graph import Edge, Node, Tape, cut
from gradveil.layers.modules import copied_buffers, input_of
from gradveil.layers.rules import RULES, Call


def record(model: nn.Module, layer: str, x: Tensor) -> Tape | str:
    """Return the forward pass from x to the layer's input as a tape, or the name of an operation unknown to tapes.

    The model runs as it is: any control flow, hooks, dropout masks of the current random state.
    """
    with torch.no_grad():
        recorder = Recorder(x.detach())
        with recorder:
            r = input_of(model, layer, recorder.x, copied_buffers(model))
        return recorder.tape(r)


class Recorder(TorchDispatchMode):
    """Follow every tensor that depends on x.

    A tensor is known by its identity. Where another name for the same memory turns up (an alias made behind the
    back of this mode, or a write in place), what depends on it is marked unknown: no wrong answer, only no tape.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x
        self.nodes = [Node(tuple(x.shape), ())]
        self._known: dict[int, tuple[Tensor, int]] = {id(x): (x, 0)}  # the tensor is kept, so that its id stays its own
        self._constant: dict[int, Tensor] = {}  # shares memory with a known one, yet does not depend on x
        self._memory: dict[int, set[int]] = {_memory(x): {id(x)}}  # storage -> ids of known tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.overloadpacket.__name__
        used = [t for t in _tensors((*args, *kwargs.values())) if self._depends(t)]
        in_place = name.endswith("_") and not name.endswith("__")
        if used and in_place and used[0] is args[0]:
            args_before = (args[0].clone(), *args[1:])
            self._known[id(args_before[0])] = (args_before[0], self._node_of(args[0]))
        else:
            args_before = args
        out = func(*args, **kwargs)
        outs = out if isinstance(out, tuple | list) else (out,)
        if in_place and isinstance(args[0], Tensor):
            self._overwritten(args[0])
        if not used or name == "detach" or name.endswith("_like") or name.startswith("new_"):
            self._note_constants(outs)
        else:
            self._note(name.removesuffix("_"), args_before, kwargs, tuple(outs))
        return out

    def tape(self, r: Tensor) -> Tape | str:
        """Return what leads from x to r; an operation's name where that has no linear map."""
        if id(r) not in self._known:
            return "an operation that hides its input"
        return cut(self.nodes, self._known[id(r)][1], self.x, r)

    def add(self, out: Tensor, edges: tuple[Edge, ...], unknown: str = "") -> None:
        """Note a tensor that depends on x."""
        self.nodes.append(Node(tuple(out.shape), edges, unknown))
        self._known[id(out)] = (out, len(self.nodes) - 1)
        self._memory.setdefault(_memory(out), set()).add(id(out))

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], outs: tuple[Any, ...]) -> None:
        found = RULES[name](Call(args, kwargs, outs, self._depends)) if name in RULES else None
        edges = tuple(Edge(self._node_of(tensor), operator) for tensor, operator in found or ())
        for place, out in enumerate(outs):
            if isinstance(out, Tensor) and out.is_floating_point():
                known = place == 0 and found is not None
                self.add(out, edges if known else (), "" if known else name)

    def _depends(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or id(value) in self._constant:
            return False
        if id(value) in self._known:
            return True
        if _memory(value) not in self._memory:
            return False
        self.add(value, (), "a second name for the same memory")
        return True

    def _node_of(self, tensor: Tensor) -> int:
        return self._known[id(tensor)][1]

    def _note_constants(self, outs: Any) -> None:
        for out in outs:
            if isinstance(out, Tensor) and _memory(out) in self._memory:
                self._constant[id(out)] = out

    def _overwritten(self, tensor: Tensor) -> None:
        """Mark all other names of this memory as unknown from here on."""
        for other in self._memory.get(_memory(tensor), set()) - {id(tensor)}:
            self.add(self._known[other][0], (), "a write in place")


def _memory(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
