"""``leak_scores``: how much each entry of a representation gives away, by a method of choice."""

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError, did_you_mean
from gradveil.layers import find_layer, find_module, prefix
from gradveil.scores.auto import choose
from gradveil.scores.deflation import deflation_rows
from gradveil.scores.exact import exact_rows
from gradveil.scores.generic import generic_rows
from gradveil.scores.jacobian import FunctionJacobian, Jacobian
from gradveil.scores.loop import loop_rows
from gradveil.scores.moment import moment_rows
from gradveil.scores.record import record
from gradveil.scores.rows import NORMS, Rows, scores, wide
from gradveil.scores.sketch import sketch_rows
from gradveil.scores.tape import Tape
from gradveil.scores.walk import chain, walk

METHODS = ("auto", "exact", "loop", "sketch", "moment", "deflation")
MEMORY = 2**29  # bytes


def leak_scores(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    probes: int = 64,
    seed: int = 0,
    memory: int = MEMORY,
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
    rows = compute(model, layer, x, method, p=p, probes=probes, seed=seed, memory=memory)
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
    memory: int = MEMORY,
) -> tuple[Tensor, Tensor]:
    """Return r and ||∂r_i/∂x||_p of each entry, both (N, L); the settings are those of ``leak_scores``."""
    rows = compute(model, layer, x, method, p=p, probes=probes, seed=seed, memory=memory)
    return rows.r, rows.norms[float(p)]


@torch.no_grad()
def compute(
    model: nn.Module, layer: str | None, x: Tensor, method: str, *, p: float, probes: int, seed: int, memory: int
) -> Rows:
    """Return r and the norms for 2 and p, by the method of that name."""
    _check(x, method, p, probes, memory)
    model = getattr(model, "_orig_mod", model)  # a compiled model: run what was compiled, plainly
    path = find_layer(model) if layer is None else layer.removeprefix("_orig_mod.")
    find_module(model, path)
    ps = tuple(dict.fromkeys((2.0, float(p))))
    if x.shape[0] == 0:
        r = prefix(model, path)(x).flatten(1)
        return Rows(r, dict.fromkeys(ps, wide(r)))
    if method == "loop":
        return loop_rows(model, path, x, ps)
    jacobian = linearise(model, path, x) if method != "moment" else _tape(model, path, x)
    if isinstance(jacobian, str):
        raise ScoreError(f"Method 'moment' cannot pass through {jacobian}. Use exact, sketch or deflation.")
    _check_representation(jacobian, path)
    if method == "auto":
        method = choose(jacobian, probes, p)
    return _by_method(jacobian, method, ps, probes, seed, memory)


def _by_method(jacobian: Jacobian, method: str, ps: tuple[float, ...], probes: int, seed: int, memory: int) -> Rows:
    if method == "exact":
        if isinstance(jacobian, Tape):
            return exact_rows(jacobian, ps, memory)
        return generic_rows(jacobian, ps, memory)
    if method == "sketch":
        return sketch_rows(jacobian, probes, seed, memory)
    if method == "deflation":
        return deflation_rows(jacobian, probes, seed, memory)
    assert isinstance(jacobian, Tape)
    return moment_rows(jacobian)


def linearise(model: nn.Module, layer: str, x: Tensor) -> Jacobian:
    """Return the Jacobian of the layer's input: explicit where every operation is known, else by differentiation."""
    found = _tape(model, layer, x)
    return FunctionJacobian(model, layer, x) if isinstance(found, str) else found


def _tape(model: nn.Module, layer: str, x: Tensor) -> Tape | str:
    layers = chain(model, layer)
    walked = walk(layers, x) if layers is not None else None
    return record(model, layer, x) if walked is None else walked


def _check(x: Tensor, method: str, p: float, probes: int, memory: int) -> None:
    if method not in METHODS:
        hint = did_you_mean(method, METHODS)
        raise ScoreError(f"No method is called {method!r}. {hint}Known: {', '.join(METHODS)}.")
    if p not in NORMS:
        raise ScoreError(f"p={p} is no norm that rows are measured in. Give 1, 2 or inf.")
    if p != 2 and method in ("sketch", "moment", "deflation"):
        raise ScoreError(f"Method {method!r} estimates p=2 only, and p={p} was asked for. Use exact.")
    if x.ndim == 0 or not x.is_floating_point():
        raise ScoreError(f"x is {x.ndim}-dimensional {x.dtype}; give a batch of floating point numbers, (N, ...).")
    if probes < 1 or memory < 1:
        raise ScoreError(f"probes and memory are at least 1; got {probes} and {memory}.")


def _check_representation(jacobian: Jacobian, layer: str) -> None:
    r, x = jacobian.r, jacobian.x
    if r.ndim < 2 or r.shape[0] != x.shape[0]:
        raise ScoreError(
            f"The input of layer {layer!r} has shape {tuple(r.shape)} for {x.shape[0]} examples; its first dimension "
            "must count them. Choose a layer before examples are merged."
        )
