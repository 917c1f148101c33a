"""``leak_scores``: how much each entry of a representation gives away, by a method of choice."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradveil.errors import ScoreError, did_you_mean
from gradveil.modules import check_ready, find_layer, find_module, prefix, under_transform
from gradveil.representation.cpu_kernel import lanes_rows
from gradveil.representation.jacobian import FunctionJacobian, Jacobian, Tape
from gradveil.representation.matrices import paired_rows
from gradveil.representation.recorder import Graph, record, walk, walkable
from gradveil.representation.rows import (
    NORMS,
    RowNorms,
    exact_rows,
    generic_rows,
    moment_rows,
    random_signs,
    scores,
    sketch_rows,
)
from gradveil.representation.rules.base import wide

METHODS = ("auto", "exact", "loop", "sketch", "moment")
MEMORY = {"cpu": 2**29, "cuda": 2**31}  # bytes, where none are given
_LIGHT = 1e11  # multiplications of a call that launching kernels one by one would slow down
# Multiplications of all rows up to which `auto` is exact: what takes half a training step of the smallest networks
# (measured by bench/guard.py; a millisecond of one CPU core). The same on every device, so that masks are as well.
BUDGET = 1e8
PROBES = 8  # of the sketch that `auto` falls back to: each costs about as much as a forward pass


def leak_scores(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    probes: int = 64,
    seed: int = 0,
    memory: int | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """Return how much each entry of a layer's input r gives away of each example, (N, L).

    The score is |r_i| / ||∂r_i/∂x||_2 (Sun et al. 2020, algorithm 1): the norm of r_i times the pseudo-inverse of its
    gradient. ``p`` in 1, 2, inf measures that norm, |r_i| ||g||_p / ||g||_2². An entry that is 0 scores 0; one that is
    not, with no gradient, scores +inf.

    ``layer`` is the path of any module; its input is the representation. None: the last fully connected layer.
    ``method``: ``exact``, ``loop`` (the slow reference), the estimators ``sketch`` (with ``probes`` random products
    from ``seed``) and ``moment``, or ``auto``. ``memory``: bytes that intermediate rows may take. ``seen``: the layer's
    input as another pass on x had it; raise where the model has another one now.

    The model is run as it is (train or eval mode, random state, hooks) but is left untouched: no gradients, buffers or
    random numbers change. Batch norm in train mode: ∂r_n/∂x_n with the batch's statistics held.
    """
    rows = _rows(model, layer, x, Method.of(x, method, p, probes, seed, memory), seen)
    return scores(rows.r, rows.norms, float(p))


def row_norms(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return r and ||∂r_i/∂x||_p of each entry, both (N, L); the settings are those of ``leak_scores``."""
    rows = _rows(model, layer, x, Method.of(x, method, p), seen)
    return rows.r, rows.norms[float(p)]


@torch.no_grad()
def _rows(model: nn.Module, layer: str | None, x: Tensor, method: "Method", seen: Tensor | None) -> RowNorms:
    """Return r and the norms that the method asks for."""
    if torch.is_inference_mode_enabled() or x.is_inference():  # tensors of that mode cannot be differentiated
        with torch.inference_mode(False):
            return _rows(model, layer, x.clone(), method, seen)
    model = getattr(model, "_orig_mod", model)  # a compiled model: run what was compiled, plainly
    path = find_layer(model) if layer is None else layer.removeprefix("_orig_mod.")
    while isinstance(model, nn.DataParallel | DistributedDataParallel):  # run on this device alone
        model, path = model.module, path.removeprefix("module.")
    find_module(model, path)
    check_ready(model)
    if x.shape[0] == 0:
        r = prefix(model, path)(x).flatten(1)
        return RowNorms(r, dict.fromkeys(method.ps, wide(r)))
    if method.name == "loop":
        jacobian: Jacobian = FunctionJacobian(model, path, x, plainly=True)
        check_shapes(jacobian)
        jacobian.check_examples()
    else:
        if x.is_cuda and (layers := walkable(model, path, x)) is not None:
            return replayed(model, layers, x, method)
        jacobian = linearise(model, path, x, must_be_explicit=method.name == "moment")
    jacobian.check_seen(seen)
    return method(jacobian)


def linearise(model: nn.Module, layer: str, x: Tensor, *, must_be_explicit: bool = False) -> Jacobian:
    """Return the Jacobian of the layer's input: explicit where every operation is known, else by differentiation.

    Raise where examples are mixed; forward passes of one structure are looked at once.
    """
    found: Jacobian | str
    graph: Graph | None = None
    if (layers := walkable(model, layer, x)) is not None:
        found = walk(layers, x)
    else:
        found, graph = _recorded(model, layer, x)
    if isinstance(found, str):
        if must_be_explicit:
            raise ScoreError(f"Method 'moment' cannot pass through {found}. Use exact or sketch.")
        found = FunctionJacobian(model, layer, x, plainly=graph is None)
    if not found.separate:
        known = _UNMIXED.setdefault(find_module(model, layer), set())
        structure = None if graph is None else graph.structure
        if structure is None or structure not in known:
            check_shapes(found)
            found.check_examples()
            known.update([] if structure is None else [structure])
    return found


def _recorded(model: nn.Module, layer: str, x: Tensor) -> tuple[Tape | str, Graph | None]:
    """Return the forward pass as a tape, or what stands in the way, and the recording, where there is one."""
    hooked = [name for name, m in model.named_modules() if m._backward_hooks or m._backward_pre_hooks]
    if hooked:
        return f"a backward hook of {hooked[0] or type(model).__name__}", None
    try:
        graph = record(model, layer, x)
    except RuntimeError as error:  # a forward pass may ask its tensors for gradients
        return f"a pass without gradients ({str(error).splitlines()[0]})", None
    return graph.linearise(), graph


_UNMIXED: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # layer: passes to it that mix no examples


def check_shapes(jacobian: Jacobian) -> None:
    """Raise unless the first dimension of r counts the examples."""
    r, n = jacobian.r, jacobian.x.shape[0]
    if r.ndim < 2 or r.shape[0] != n:
        raise ScoreError(
            f"The layer's input has shape {tuple(r.shape)} for {n} examples; its first dimension must count them. "
            "Choose a layer before examples are merged."
        )


@dataclass(frozen=True)
class Method:
    """A method by name, with its settings."""

    name: str
    ps: tuple[float, ...] = (2.0,)  # the norms asked for; 2 is always among them
    probes: int = 64
    seed: int = 0
    memory: int = MEMORY["cpu"]

    @classmethod
    def of(cls, x: Tensor, name: str, p: float, probes: int = 64, seed: int = 0, memory: int | None = None) -> "Method":
        """Check the settings, and that x is something to be scored."""
        if name not in METHODS:
            hint = did_you_mean(name, METHODS)
            raise ScoreError(f"No method is called {name!r}. {hint}Known: {', '.join(METHODS)}.")
        if p not in NORMS:
            raise ScoreError(f"p={p} is no norm that rows are measured in. Give 1, 2 or inf.")
        if p != 2 and name in ("sketch", "moment"):
            raise ScoreError(f"Method {name!r} estimates p=2 only, and p={p} was asked for. Use exact.")
        if not isinstance(x, Tensor):
            raise ScoreError(
                f"x is a {type(x).__name__}; give one tensor (N, ...), and wrap a model of several inputs."
            )
        if under_transform():
            raise ScoreError(
                "Scores cannot be computed inside torch.func transforms (vmap, grad, ...). Call outside them."
            )
        if x.ndim == 0 or not x.is_floating_point():
            raise ScoreError(f"x is {x.ndim}-dimensional {x.dtype}; give a batch of floating point numbers, (N, ...).")
        if probes < 1 or (memory is not None and memory < 1):
            raise ScoreError(f"probes and memory are at least 1; got {probes} and {memory}.")
        ps = tuple(dict.fromkeys((2.0, float(p))))
        return cls(name, ps, probes, seed, memory or MEMORY.get(x.device.type, MEMORY["cpu"]))

    def __call__(self, jacobian: Jacobian, *, static: bool = False) -> RowNorms:
        check_shapes(jacobian)
        auto = self.name == "auto"
        name = choose(jacobian, self.ps[-1]) if auto else self.name
        if name == "moment" and isinstance(jacobian, Tape):  # an estimate: no more exact than the model's own pass
            return moment_rows(jacobian)
        with _precision(jacobian.x):
            if name in ("exact", "loop"):
                return self._exact(jacobian, static)
            if name == "sketch":
                return sketch_rows(jacobian, PROBES if auto else self.probes, self.seed, self.memory)
        raise ScoreError(f"Method {name!r} needs a model of known operations. Use exact or sketch.")

    def _exact(self, jacobian: Jacobian, static: bool) -> RowNorms:
        if not isinstance(jacobian, Tape):
            return generic_rows(jacobian, self.ps, self.memory)
        fast = paired_rows if _takes_tf32(jacobian.x) else lanes_rows
        found = fast(jacobian, self.ps, self.memory)
        return exact_rows(jacobian, self.ps, self.memory, skip=not static) if found is None else found

    def constants(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what calls share beside the model: a recording must keep it alive."""
        if self.name != "sketch":  # a chain of known layers has no need of the sketch under `auto`
            return ()
        return (random_signs(self.probes, tuple(x.shape[1:]), self.seed, wide(x).dtype, str(x.device)),)

    def is_static(self, tape: Tape) -> bool:
        """Return whether a call is worth recording for replay: short, and without steps that wait for the device."""
        name = choose(tape, self.ps[-1]) if self.name == "auto" else self.name
        passes = {"moment": 1, "sketch": self.probes}.get(name, min(_size(tape.r), _size(tape.x)))
        return passes * tape.cost * tape.r.shape[0] <= _LIGHT


def _takes_tf32(x: Tensor) -> bool:
    """Return whether the user has let CUDA round float32 products: ``torch.set_float32_matmul_precision("high")``."""
    return x.is_cuda and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _precision(x: Tensor) -> Iterator[None]:
    """Within, convolutions on CUDA round no more than the user lets matrix products round."""
    if not x.is_cuda or _takes_tf32(x):
        yield
        return
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def choose(jacobian: Jacobian, p: float) -> str:
    """Return the method that ``auto`` stands for, from shapes alone: the same call always gets the same one.

    ``exact`` where p is not 2 (an estimate knows no other) and where rows × multiplications of one backward pass ×
    examples stay within a budget; else ``moment``, or ``sketch`` where an operation has no map.
    """
    quick = "moment" if isinstance(jacobian, Tape) else "sketch"
    within = effort(jacobian) * jacobian.r.shape[0] <= BUDGET
    return "exact" if p != 2 or within else quick


def effort(jacobian: Jacobian) -> int:
    """Return the multiplications that all rows of one example take."""
    # What an unknown operation costs cannot be read off; a dense matrix from input to output is taken for it.
    cost = jacobian.cost if isinstance(jacobian, Tape) else _size(jacobian.r) * _size(jacobian.x)
    return min(_size(jacobian.r), _size(jacobian.x)) * cost


def _size(t: Tensor) -> int:
    return t[0].numel()


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


def replayed(model: nn.Module, layers: list[nn.Module], x: Tensor, method: Method) -> RowNorms:
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
