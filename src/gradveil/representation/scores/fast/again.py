"""A pass that was recorded once is run again by its calls, and compared with what the model itself gave."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError
from gradveil.representation.layers.recorder import Graph
from gradveil.representation.layers.replay import Program
from gradveil.representation.layers.rules.base import wide
from gradveil.representation.scores.exact import RowNorms
from gradveil.representation.scores.fast.cuda import replayed

if TYPE_CHECKING:
    from gradveil.representation.scores.api import Method

_KEPT = 4  # programs of one model
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
    while len(known) > _KEPT:
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
    rows = _run(known.program, model, x, method) if known.uses < _RENEWED else None
    if rows is not None and rows.r.numel() == seen.numel():
        r, other = wide(rows.r).flatten(), wide(seen.detach()).flatten()
        if bool((r - other).abs().max() <= _CLOSE * other.abs().max()):
            return rows
    del _PROGRAMS[model][kind]
    return None


def _run(program: Program, model: nn.Module, x: Tensor, method: "Method") -> RowNorms | None:
    if x.is_cuda and not program.random:
        places = tuple((p.data_ptr(), p.shape, p.dtype) for _, p in program.weights(copied=False))
        return replayed(model, program, (id(program), *places), x, method)
    with torch.random.fork_rng([x.device] if x.is_cuda else []) if program.random else nullcontext():
        tape = program(x)
    return None if tape is None else method(tape)


def _kind(model: nn.Module, layer: str, x: Tensor) -> Hashable:
    """Return what passes of one program have in common."""
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
