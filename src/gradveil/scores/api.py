"""``leak_scores``: how much each entry of a representation gives away, by a method of choice."""

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError, did_you_mean
from gradveil.layers.jacobian import FunctionJacobian, Jacobian, Tape
from gradveil.layers.modules import find_layer, find_module, prefix
from gradveil.layers.recorder import record
from gradveil.layers.rules.base import wide
from gradveil.layers.sequential import walk, walkable
from gradveil.scores.fast.cuda import replayed
from gradveil.scores.methods import MEMORY, METHODS, Method, loop_rows
from gradveil.scores.rows import NORMS, RowNorms, scores


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
) -> Tensor:
    """Return how much each entry of a layer's input r gives away of each example, (N, L).

    The score is |r_i| / ||∂r_i/∂x||_2 (Sun et al. 2020, algorithm 1): the norm of r_i times the pseudo-inverse of its
    gradient. ``p`` in 1, 2, inf measures that norm, |r_i| ||g||_p / ||g||_2². An entry that is 0 scores 0; one that is
    not, with no gradient, scores +inf.

    ``layer`` is the path of any module; its input is the representation. None: the last fully connected layer.
    ``method``: ``exact``, ``loop`` (the slow reference), the estimators ``sketch``, ``deflation`` (both with ``probes``
    random products from ``seed``) and ``moment``, or ``auto``. ``memory``: bytes that intermediate rows may take.

    The model is run as it is (train or eval mode, random state, hooks) but is left untouched: no gradients, buffers or
    random numbers change. Batch norm in train mode: ∂r_n/∂x_n with the batch's statistics held.
    """
    rows = compute(model, layer, x, method, p, probes, seed, memory)
    return scores(rows.r, rows.norms, float(p))


def row_norms(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    probes: int = 64,
    seed: int = 0,
    memory: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return r and ||∂r_i/∂x||_p of each entry, both (N, L); the settings are those of ``leak_scores``."""
    rows = compute(model, layer, x, method, p, probes, seed, memory)
    return rows.r, rows.norms[float(p)]


@torch.no_grad()
def compute(
    model: nn.Module, layer: str | None, x: Tensor, name: str, p: float, probes: int, seed: int, memory: int | None
) -> RowNorms:
    """Return r and the norms for 2 and p, by the method of that name."""
    _check(x, name, p, probes, memory)
    model = getattr(model, "_orig_mod", model)  # a compiled model: run what was compiled, plainly
    path = find_layer(model) if layer is None else layer.removeprefix("_orig_mod.")
    find_module(model, path)
    ps = tuple(dict.fromkeys((2.0, float(p))))
    if x.shape[0] == 0:
        r = prefix(model, path)(x).flatten(1)
        return RowNorms(r, dict.fromkeys(ps, wide(r)))
    if name == "loop":
        return loop_rows(model, path, x, ps)
    method = Method(name, ps, probes, seed, memory or MEMORY.get(x.device.type, MEMORY["cpu"]))
    if x.is_cuda and (layers := walkable(model, path, x)) is not None:
        return replayed(model, layers, x, method)
    return method(linearise(model, path, x, must_be_explicit=name == "moment"))


def linearise(model: nn.Module, layer: str, x: Tensor, *, must_be_explicit: bool = False) -> Jacobian:
    """Return the Jacobian of the layer's input: explicit where every operation is known, else by differentiation."""
    layers = walkable(model, layer, x)
    tape = record(model, layer, x).linearise() if layers is None else walk(layers, x)
    if isinstance(tape, Tape):
        return tape
    if must_be_explicit:
        raise ScoreError(f"Method 'moment' cannot pass through {tape}. Use exact, sketch or deflation.")
    return FunctionJacobian(model, layer, x)


def _check(x: Tensor, name: str, p: float, probes: int, memory: int | None) -> None:
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise ScoreError(f"No method is called {name!r}. {hint}Known: {', '.join(METHODS)}.")
    if p not in NORMS:
        raise ScoreError(f"p={p} is no norm that rows are measured in. Give 1, 2 or inf.")
    if p != 2 and name in ("sketch", "moment", "deflation"):
        raise ScoreError(f"Method {name!r} estimates p=2 only, and p={p} was asked for. Use exact.")
    if x.ndim == 0 or not x.is_floating_point():
        raise ScoreError(f"x is {x.ndim}-dimensional {x.dtype}; give a batch of floating point numbers, (N, ...).")
    if probes < 1 or (memory is not None and memory < 1):
        raise ScoreError(f"probes and memory are at least 1; got {probes} and {memory}.")
