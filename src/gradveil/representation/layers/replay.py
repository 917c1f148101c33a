"""The same forward pass again, without a recorder: its calls one after the other, on other examples and weights.

A recorder costs more than the operations of a small network. What it saw once is run again as it was; whoever does so
must compare what comes out with what the model itself gives, since a model may do something else the next time.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradveil.representation.layers.jacobian import Edge, Node, Tape
from gradveil.representation.layers.recorder import Graph
from gradveil.representation.layers.rules.base import Call, Rule


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor among arguments."""

    at: int


@dataclass(frozen=True)
class Instruction:
    """One call on slots."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]  # slots
    rule: Rule | None
    made: tuple[tuple[int, int], ...]  # outputs on the way to r: which, and their node
    overwrites: bool  # its first argument, which is on the way to r


@dataclass(frozen=True)
class Program:
    """All calls from x and the weights to r, and which of them are the nodes of a tape."""

    instructions: tuple[Instruction, ...]
    leaves: tuple[tuple[int, "weakref.ref[nn.Module]", str], ...]  # slot, module, name of a parameter or buffer
    constants: tuple[tuple[int, Tensor], ...]
    slots: int  # how many; the first is x
    nodes: int
    end: int  # slot of r
    random: bool  # whether random numbers are drawn

    @classmethod
    def of(cls, model: nn.Module, graph: Graph) -> "Program | None":
        """Return the program of a pass whose calls were kept; None where Python saw values, or r cannot be found."""
        writer = _Writer(graph)
        calls = [call for call in graph.calls if _found(Tensor, (call.args, tuple(call.kwargs.values()), call.outs))]
        if any(isinstance(out, bool | int | float | complex) for call in calls for out in call.outs):
            return None
        leaves = []
        for name, t in graph.state.items():
            owner, _, own = name.rpartition(".")
            leaves.append((writer.new(t), weakref.ref(model.get_submodule(owner)), own))
        instructions = tuple(map(writer.instruction, calls))
        if id(writer.last) not in writer.slots:
            return None
        used = {slot.at for each in instructions for slot in _found(Slot, (each.args, tuple(each.kwargs.values())))}
        return cls(
            instructions, tuple(leaf for leaf in leaves if leaf[0] in used), tuple(writer.constants), writer.count,
            len(writer.node), writer.slots[id(writer.last)],
            any(torch.Tag.nondeterministic_seeded in each.function.tags for each in instructions),
        )  # fmt: skip

    def weights(self, *, copied: bool = True) -> list[tuple[int, Tensor]]:
        """Return what stands in the slots of parameters and buffers now; a copy of buffers, which may be written to."""
        found = []
        for slot, module, name in self.leaves:
            owner = module()
            assert owner is not None  # the model is in use
            value = owner._parameters.get(name, owner._buffers.get(name))
            assert value is not None
            found.append((slot, value.clone() if copied and name in owner._buffers else value.detach()))
        return found

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tape | None:
        """Return the tape for examples x; None where an operation has no maps this time."""
        values: list[Any] = [None] * self.slots
        values[0] = x = x.detach().clone()
        for slot, t in (*self.weights(), *self.constants):
            values[slot] = t
        place, nodes, old = {id(x): 0}, [Node(tuple(x.shape), ())], []
        for each in self.instructions:
            args = tuple([_filled(a, values) for a in each.args])
            kwargs = {k: _filled(v, values) for k, v in each.kwargs.items()} if each.kwargs else {}
            before = args
            if each.overwrites:
                old.append(args[0].clone())  # kept, so that its id stays its own
                place[id(old[-1])] = place[id(args[0])]
                before = (old[-1], *args[1:])
            out = each.function(*args, **kwargs)
            outs = tuple(out) if isinstance(out, tuple | list) else (out,)
            for slot, t in zip(each.outs, outs, strict=True):
                values[slot] = t
            for at, node in each.made:
                assert each.rule is not None
                maps = each.rule.edges(Call(each.function, before, kwargs, outs, lambda t: id(t) in place, at))
                if maps is None or node != len(nodes):
                    return None
                nodes.append(Node(tuple(outs[at].shape), tuple(Edge(place[id(t)], o) for t, o in maps)))
                place[id(outs[at])] = node
        return Tape(tuple(nodes), x, values[self.end])


class _Writer:
    """Gives tensors their slots."""

    def __init__(self, graph: Graph) -> None:
        self.node = {old: new for new, old in enumerate(graph.on_the_way())}
        self.slots = {id(graph.x): 0}
        self.count = 1
        self.constants: list[tuple[int, Tensor]] = []
        self.last: Any = graph.x
        self._end = graph.end
        self._on_the_way = {id(graph.x)}

    def new(self, t: Any) -> int:
        self.slots[id(t)] = self.count
        self.count += 1
        return self.count - 1

    def instruction(self, call: Any) -> Instruction:
        args, kwargs = self._slotted(call.args), {k: self._slotted(v) for k, v in call.kwargs.items()}
        first = call.args[0] if call.args else None
        outs = tuple(self._slot(out, first) for out in call.outs)
        made = tuple((at, self.node[operation]) for at, operation in call.made if operation in self.node)
        overwrites = any(out is first for out in call.outs) and id(first) in self._on_the_way
        for at, operation in call.made:
            if operation in self.node:
                self._on_the_way.add(id(call.outs[at]))
            if operation == self._end:
                self.last = call.outs[at]
        return Instruction(call.function, args, kwargs, outs, call.rule, made, overwrites)

    def _slot(self, out: Any, first: Any) -> int:
        return self.slots[id(out)] if out is first and id(out) in self.slots else self.new(out)

    def _slotted(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.slots:
                self.constants.append((self.new(value), value))
            return Slot(self.slots[id(value)])
        return type(value)(map(self._slotted, value)) if type(value) in (list, tuple) else value


def _filled(value: Any, values: list[Any]) -> Any:
    if type(value) is Slot:
        return values[value.at]
    return [_filled(v, values) for v in value] if type(value) in (list, tuple) else value


def _found(kind: type, value: Any) -> list[Any]:
    """Return what is of a kind in lists of lists."""
    if isinstance(value, kind):
        return [value]
    return [inside for v in value for inside in _found(kind, v)] if isinstance(value, list | tuple) else []
