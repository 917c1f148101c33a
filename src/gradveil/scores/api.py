"""``leak_scores``: how much each entry of a representation gives away, by a method of choice."""

from math import inf

import torch
from torch import Tensor, nn

from gradveil.errors import ScoreError, did_you_mean
from gradveil.layers import find_layer, find_module
from gradveil.scores.generic import generic_rows
from gradveil.scores.jacobian import FunctionJacobian
from gradveil.scores.loop import loop_rows
from gradveil.scores.rows import NORMS, Rows, scores

METHODS = ("auto", "loop", "exact")


def leak_scores(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    probes: int = 64,
    seed: int = 0,
    memory: int = 2**28,
) -> Tensor:
    """Return how much each entry of the layer's input gives away of each example, (N, L)."""
    rows = _rows(model, layer, x, method, p, memory)
    return scores(rows.r, rows.norms, p)


def row_norms(
    model: nn.Module,
    layer: str | None,
    x: Tensor,
    method: str = "auto",
    *,
    p: float = 2.0,
    probes: int = 64,
    seed: int = 0,
    memory: int = 2**28,
) -> tuple[Tensor, Tensor]:
    """Return r and ||∂r_i/∂x||_p of every entry, both (N, L)."""
    rows = _rows(model, layer, x, method, p, memory)
    return rows.r, rows.norms[p]


def _rows(model: nn.Module, layer: str | None, x: Tensor, method: str, p: float, memory: int) -> Rows:
    if method not in METHODS:
        raise ScoreError(f"No method is called {method!r}. {did_you_mean(method, METHODS)}Known: {', '.join(METHODS)}.")
    if p not in NORMS:
        raise ScoreError(f"p={p} is not a norm that rows are measured in. Give 1, 2 or inf.")
    path = find_layer(model) if layer is None else layer
    find_module(model, path)
    ps = tuple(dict.fromkeys((2.0, float(p))))
    if method == "loop":
        return loop_rows(model, path, x, ps)
    return generic_rows(FunctionJacobian(model, path, x), ps, memory)
