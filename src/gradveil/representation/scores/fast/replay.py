"""Plain chains on CUDA as one recording: a small network's operations take less time than what launches them."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradveil.representation.layers.recorder import walk
from gradveil.representation.scores.exact import RowNorms

if TYPE_CHECKING:
    from gradveil.representation.scores.api import Method

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


def replayed(model: nn.Module, layers: list[nn.Module], x: Tensor, method: "Method") -> RowNorms:
    """Return what the method finds for a walked chain, from the second call of its kind on by replay.

    Of one kind are calls with the same method, shapes, precision, layers and places of weights in memory; the values
    of x and of the weights may change. Long calls, and those that cannot be recorded, are made plainly.
    """

    def static(inputs: Tensor) -> RowNorms:
        return method(walk(layers, inputs), static=True)

    if torch.cuda.is_current_stream_capturing():
        return static(x)
    precision = torch.get_float32_matmul_precision()
    kind = (method, x.shape, x.dtype, x.device, precision, tuple(map(_signature, layers)))
    known = _RECORDINGS.setdefault(model, OrderedDict())
    if kind not in known:
        tape = walk(layers, x)
        known[kind] = _NEW if method.is_static(tape) else _PLAIN
        while len(known) > _KEPT:
            known.popitem(last=False)
        return method(tape)
    known.move_to_end(kind)
    if known[kind] == _NEW:
        try:
            with torch.cuda.device(x.device):
                known[kind] = Recording.of(static, x, method.constants(x))
        except RuntimeError:
            known[kind] = _PLAIN
    recording = known[kind]
    return recording(x) if isinstance(recording, Recording) else method(walk(layers, x))


def _signature(layer: nn.Module) -> Hashable:
    settings = tuple(map(layer.__dict__.get, _SETTINGS))
    places = tuple((p.data_ptr(), p.shape, p.dtype) for p in layer._parameters.values() if p is not None)
    return id(layer), settings, places
