"""The same pass again without a recorder: its calls one after the other, and on CUDA as one recording.

A recorder costs more than the operations of a small network. What it saw once is run again as it was, on other
examples and weights, and compared with what the model itself gives, since a model may do something else the next time.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError
from gradveil.representation.layers.jacobian import Edge, Node, Tape
from gradveil.representation.layers.recorder import Graph, walk
from gradveil.representation.layers.rules.base import Call, Rule, wide
from gradveil.representation.scores.exact import RowNorms

if TYPE_CHECKING:
    from gradveil.representation.scores.api import Method


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
    if isinstance(value, kind):
        return [value]
    return [inside for v in value for inside in _found(kind, v)] if isinstance(value, list | tuple) else []


_KEPT = 4  # recordings of one model; each holds the memory it works in
_SETTINGS = ("stride", "padding", "dilation", "groups", "kernel_size", "ceil_mode", "start_dim", "end_dim")
_NEW, _PLAIN = "seen once", "never to be recorded"


@dataclass(frozen=True)
class Recording:
    """One call as a CUDA graph: it reads ``inputs`` and the model's weights where they lie, and writes ``rows``."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    rows: RowNorms
    kept: tuple[Tensor, ...]  # read by the graph as well

    @classmethod
    def of(cls, run: Callable[[Tensor], RowNorms], x: Tensor, kept: tuple[Tensor, ...]) -> "Recording":
        """Record a call; it must not wait for the device."""
        inputs = x.clone()
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):  # libraries set themselves up here, not in the recording
            for _ in range(2):
                run(inputs)
        torch.cuda.current_stream(x.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rows = run(inputs)
        return cls(graph, inputs, rows, kept)

    def __call__(self, x: Tensor) -> RowNorms:
        self.inputs.copy_(x)
        self.graph.replay()
        return RowNorms(self.rows.r.clone(), {p: norms.clone() for p, norms in self.rows.norms.items()})


_RECORDINGS: WeakKeyDictionary[nn.Module, "OrderedDict[Hashable, Recording | str]"] = WeakKeyDictionary()


def replayed_chain(model: nn.Module, layers: list[nn.Module], x: Tensor, method: "Method") -> RowNorms:
    """Return what the method finds for a walked chain."""
    found = replayed(model, partial(walk, layers), tuple(map(_signature, layers)), x, method)
    assert found is not None  # a walk always gives a tape
    return found


def replayed(
    model: nn.Module, run: Callable[[Tensor], Tape | None], places: Hashable, x: Tensor, method: "Method"
) -> RowNorms | None:
    """Return what the method finds on the tape that ``run`` makes of x, from the second call of its kind on by replay.

    Of one kind are calls with the same method, shapes, precision, layers and places of weights in memory; the values
    of x and of the weights may change. Long calls, and those that cannot be recorded, are made plainly. None where
    there is no tape.
    """
    if torch.cuda.is_current_stream_capturing():
        return _rows(method, run, x, static=True)
    kind = (method, x.shape, x.dtype, x.device, torch.get_float32_matmul_precision(), places)
    known = _RECORDINGS.setdefault(model, OrderedDict())
    if kind not in known:
        tape = run(x)
        if tape is None:
            return None
        known[kind] = _NEW if method.is_static(tape) else _PLAIN
        while len(known) > _KEPT:
            known.popitem(last=False)
        return method(tape)
    known.move_to_end(kind)
    if known[kind] == _NEW:
        try:
            with torch.cuda.device(x.device):
                known[kind] = Recording.of(partial(_static_call, method, run), x, method.constants(x))
        except RuntimeError:
            known[kind] = _PLAIN
    recording = known[kind]
    return recording(x) if isinstance(recording, Recording) else _rows(method, run, x)


def _rows(method: "Method", run: Callable[[Tensor], Tape | None], x: Tensor, static: bool = False) -> RowNorms | None:
    tape = run(x)
    return None if tape is None else method(tape, static=static)


def _static_call(method: "Method", run: Callable[[Tensor], Tape | None], inputs: Tensor) -> RowNorms:
    rows = _rows(method, run, inputs, static=True)
    if rows is None:
        raise RuntimeError("no tape")
    return rows


def _signature(layer: nn.Module) -> Hashable:
    settings = tuple(map(layer.__dict__.get, _SETTINGS))
    places = tuple((p.data_ptr(), p.shape, p.dtype) for p in layer._parameters.values() if p is not None)
    return id(layer), settings, places


_PROGRAMS_KEPT = 4  # programs of one model
_RENEWED = 100  # uses after which a pass is recorded anew: a model may stop gradients without another outcome
_CLOSE = 0.01  # of the largest entry: how far r may lie from what the model gave
_SAME = 0.05  # of the largest entry: what half precision may do to a representation


@dataclass
class _Known:
    program: Program
    uses: int = 0


_PROGRAMS: WeakKeyDictionary[nn.Module, dict[Hashable, _Known]] = WeakKeyDictionary()


def remember(model: nn.Module, layer: str, graph: Graph) -> None:
    """Keep the program of a pass whose calls were kept, where it has one."""
    program = Program.of(model, graph)
    known = _PROGRAMS.setdefault(model, {})
    if program is not None:
        known[_kind(model, layer, graph.x)] = _Known(program)
    while len(known) > _PROGRAMS_KEPT:
        known.pop(next(iter(known)))


def rows_again(model: nn.Module, layer: str, x: Tensor, method: "Method", seen: Tensor | None) -> RowNorms | None:
    """Return what the method finds by a program, where r is what was seen; else None, and the program is forgotten."""
    if seen is None or _changed.get() or model not in _PROGRAMS:
        return None
    kind = _kind(model, layer, x)
    known = _PROGRAMS[model].get(kind)
    if known is None:
        return None
    known.uses += 1
    rows = _run_program(known.program, model, x, method) if known.uses < _RENEWED else None
    if rows is not None and rows.r.numel() == seen.numel():
        r, other = wide(rows.r).flatten(), wide(seen.detach()).flatten()
        if bool((r - other).abs().max() <= _CLOSE * other.abs().max()):
            return rows
    del _PROGRAMS[model][kind]
    return None


def _run_program(program: Program, model: nn.Module, x: Tensor, method: "Method") -> RowNorms | None:
    if x.is_cuda and not program.random:
        places = tuple((p.data_ptr(), p.shape, p.dtype) for _, p in program.weights(copied=False))
        return replayed(model, program, (id(program), *places), x, method)
    with torch.random.fork_rng([x.device] if x.is_cuda else []) if program.random else nullcontext():
        tape = program(x)
    return None if tape is None else method(tape)


def _kind(model: nn.Module, layer: str, x: Tensor) -> Hashable:
    parts = tuple(
        (id(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks),
         len(m._backward_pre_hooks))
        for m in model.modules()
    )  # fmt: skip
    return layer, x.shape, x.dtype, x.device, torch.is_autocast_enabled(x.device.type), parts


_changed = ContextVar("changed", default=False)


@contextmanager
def already_changed() -> Iterator[None]:
    """Within, the representation that was seen is what another defence left of the model's own."""
    token = _changed.set(True)
    try:
        yield
    finally:
        _changed.reset(token)


def check_seen(r: Tensor, seen: Tensor | None) -> None:
    """Raise where r is another representation than the one seen before, rounding aside."""
    if seen is None or _changed.get():
        return
    off = (wide(r.detach()).flatten() - seen.detach().flatten()).abs().max()
    if bool(off > _SAME * seen.abs().max()):
        raise ScoreError(
            f"The model gives another representation when it runs on the same batch again (off by {float(off):.2g}), "
            "so its scores would be those of another pass: it counts its calls, or draws random numbers that are not "
            "torch's own. Keep what changes in buffers, and draw from torch's default generator."
        )
