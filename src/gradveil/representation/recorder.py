"""A model run as far as a layer, with what happens to the input written down; plain chains take a shorter way."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.modules import copied_state, input_of, plain_attention, sequential
from gradveil.representation.jacobian import Edge, Node, Tape
from gradveil.representation.rules.base import PLAIN, RULES, Call, Rule, Shape, Step

# What these return has the shape of their argument and nothing else of it.
_FILLED = {
    "zeros_like", "ones_like", "full_like", "empty_like",
    "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """An operation that made a tensor from others that depend on the input, and what is known of it."""

    name: str
    shape: Shape  # of the tensor
    parents: tuple[int, ...] = ()  # places of the operations that it depends on
    edges: tuple[Edge, ...] | None = None  # its linear maps at the point; None where they are not known
    step: Step | None = None  # what it is everywhere


@dataclass(frozen=True)
class Graph:
    """A forward pass from x, the first of the operations, to r."""

    operations: tuple[Operation, ...]
    end: int | None  # the operation that made r; None: r does not depend on x
    x: Tensor
    r: Tensor
    steps: list[tuple[Any, ...]]  # name, whether torch differentiates it, parents, arguments, shapes
    read: str | None  # what handed values that depend on x to Python, where anything did

    @property
    def structure(self) -> int:
        """A number that is the same for passes of the same operations on tensors of the same shapes."""
        steps = [(*step[:3], [a for a in step[3] if _is_plain(a)], step[4]) for step in self.steps]
        return hash((tuple(self.x.shape), str(steps), self.end))

    def linearise(self) -> Tape | str:
        """Return the pass at this point as linear maps, or the name of an operation on the way that has none."""
        if self.end is None:
            return "an operation that hides its input"
        wanted = {self.end}
        for at in range(self.end, -1, -1):
            if at in wanted:
                wanted.update(edge.source for edge in self.operations[at].edges or ())
        place = {old: new for new, old in enumerate(sorted(wanted))}
        nodes = []
        for operation in map(self.operations.__getitem__, place):
            if operation.edges is None:
                return operation.name
            edges = tuple(Edge(place[edge.source], edge.operator) for edge in operation.edges)
            nodes.append(Node(operation.shape, edges))
        return Tape(tuple(nodes), self.x, self.r)


def record(model: nn.Module, layer: str, x: Tensor, *, everywhere: bool = False) -> Graph:
    """Return the forward pass from x to the layer's input.

    The model runs as it is: any control flow, hooks, dropout masks of the current random state. By default what
    matters is the derivative at x, as torch takes it; ``everywhere``, what the operations are for any input. Then
    nothing that was computed from x counts as a constant, and every operation gets its step.
    """
    with torch.set_grad_enabled(not everywhere):  # nothing here asks for gradients: only the model's own blocks show
        recorder, state = Recorder(x.detach().clone(), everywhere), copied_state(model)
        with recorder, _Reads(recorder) if everywhere else plain_attention():
            r = input_of(model, layer, recorder.x, state)
        end = recorder.place(r)
        return Graph(tuple(recorder.operations), end, recorder.x, r.detach(), recorder.steps, recorder.read)


class Recorder(TorchDispatchMode):
    """Follow every tensor that depends on x.

    A tensor is known by its identity. Where another name for the same memory turns up (an alias made behind the
    back of this mode, or a write in place), what depends on it is marked unknown: no wrong answer, only none. So is
    what is done without gradients: by ``torch.no_grad``, or by a function that brings its own derivative.
    """

    def __init__(self, x: Tensor, everywhere: bool) -> None:
        super().__init__()
        self.x = x
        self.everywhere = everywhere
        self.operations = [Operation("input", tuple(x.shape), edges=())]
        self.steps: list[tuple[Any, ...]] = []
        self.read: str | None = None  # what handed values to Python
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
            self._known[id(args_before[0])] = (args_before[0], self._known[id(args[0])][1])
        else:
            args_before = args
        parents = tuple(self._known[id(t)][1] for t in used)
        out = func(*args, **kwargs)
        outs = tuple(out) if isinstance(out, tuple | list) else (out,)
        if used and any(isinstance(value, bool | int | float | complex) for value in outs):
            self.read = name
        if in_place and isinstance(args[0], Tensor):
            self._overwritten(args[0])
        own = self.everywhere or torch.is_grad_enabled()
        if not used or self._hides(name, own):
            self._note_constants(outs)
            return out
        settings = [a for a in (*args, *kwargs.items()) if not isinstance(a, Tensor)]
        self.steps.append((name, own, parents, settings, [tuple(t.shape) for t in _tensors(outs)]))
        self._note(name.removesuffix("_"), parents, Call(func, args_before, kwargs, outs, self._depends), own)
        return out

    def place(self, tensor: Tensor) -> int | None:
        return self._known[id(tensor)][1] if id(tensor) in self._known else None

    def _hides(self, name: str, own: bool) -> bool:
        if self.everywhere:
            return name in _FILLED
        return (name == "detach" and own) or name.endswith("_like") or name.startswith("new_")

    def _add(self, out: Tensor, operation: Operation) -> None:
        self.operations.append(operation)
        self._known[id(out)] = (out, len(self.operations) - 1)
        self._memory.setdefault(_memory(out), set()).add(id(out))

    def _note(self, name: str, parents: tuple[int, ...], call: Call, own: bool) -> None:
        rule = RULES.get(name) if own else None
        name = name if own else f"{name} without gradients"
        for at, out in enumerate(call.outs):
            if isinstance(out, Tensor) and (self.everywhere or out.is_floating_point()):
                known = rule if rule and (at == 0 or rule.several) else None
                edges, step = self._maps(known, replace(call, at=at) if at else call) if known else (None, None)
                self._add(out, Operation(name, tuple(out.shape), parents, edges, step))

    def _maps(self, rule: Rule, call: Call) -> tuple[tuple[Edge, ...] | None, Step | None]:
        maps = rule.edges(call)
        edges = None if maps is None else tuple(Edge(self._known[id(t)][1], operator) for t, operator in maps)
        step = None
        if self.everywhere and rule.step and maps and len(maps) == 1:
            step = rule.step(call, maps)
        return edges, step

    def _depends(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or id(value) in self._constant:
            return False
        if id(value) in self._known:
            return True
        if _memory(value) not in self._memory:
            return False
        self._add(value, Operation("a second name for the same memory", tuple(value.shape)))
        return True

    def _note_constants(self, outs: Any) -> None:
        for out in outs:
            if isinstance(out, Tensor) and _memory(out) in self._memory:
                self._constant[id(out)] = out

    def _overwritten(self, tensor: Tensor) -> None:
        for other in self._memory.get(_memory(tensor), set()) - {id(tensor)}:
            self._add(self._known[other][0], Operation("a write in place", tuple(self._known[other][0].shape)))


class _Reads(TorchFunctionMode):
    """Notice the ways from a tensor's values to Python that no operation stands for."""

    WAYS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.WAYS and self._recorder._depends(args[0]):
            self._recorder.read = name
        return func(*args, **(kwargs or {}))


def _memory(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _is_plain(value: Any) -> bool:
    inside = value if isinstance(value, list | tuple) else (value,)
    return not any(isinstance(v, Tensor) for v in inside)


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def walkable(model: nn.Module, layer: str, x: Tensor) -> list[nn.Module] | None:
    """Return the layers before ``layer``, where they are a plain chain that can be walked with x; else None.

    Plain: layers whose rule says how they are run without a recorder. Such a chain does the same at every call.
    """
    links = None if torch.is_autocast_enabled(x.device.type) else sequential(model, layer)
    if links is None:
        return None
    layers = [link.module for link in links]
    if not all(type(part) in PLAIN and PLAIN[type(part)][1](part) for part in layers):
        return None
    images = any(isinstance(part, nn.Conv2d | nn.MaxPool2d) for part in layers)
    return None if images and x.ndim != 4 else layers


def walk(layers: list[nn.Module], x: Tensor) -> Tape:
    """Run the layers of a chain on x and return what they did as a tape."""
    with torch.no_grad():
        value = x = x.detach()
        nodes = [Node(tuple(x.shape), ())]
        for layer in layers:
            value, operator = PLAIN[type(layer)][0](layer, value)
            nodes.append(Node(tuple(value.shape), (Edge(len(nodes) - 1, operator),)))
        return Tape(tuple(nodes), x, value)
