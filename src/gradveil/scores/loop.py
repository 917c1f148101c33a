"""``loop``: the plain reference, one backward pass for each entry of the representation."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradveil.layers import prefix
from gradveil.scores.rows import Rows, reduce_norms


def loop_rows(model: nn.Module, layer: str, x: Tensor, ps: Sequence[float]) -> Rows:
    """Return r and the norms of ∂r_i/∂x, one i at a time (Sun et al. 2020, algorithm 1, line 3).

    One backward pass serves all examples: with batch statistics held, r of one example depends on its own input only.
    """
    with torch.enable_grad():
        inputs = x.detach().requires_grad_()
        r = prefix(model, layer)(inputs).flatten(1)  # (N, L)
        found = [reduce_norms(_row(r, i, inputs)[None], ps) for i in range(r.shape[1])]
    stacked = [torch.cat([norms[k] for norms in found]).t() if found else r.new_zeros(r.shape) for k in range(len(ps))]
    return Rows(r.detach(), dict(zip(ps, stacked, strict=True)))


def _row(r: Tensor, i: int, inputs: Tensor) -> Tensor:
    if not r.requires_grad:  # r does not depend on the input at all
        return torch.zeros_like(inputs)
    (gradient,) = torch.autograd.grad(r[:, i].sum(), inputs, retain_graph=True, allow_unused=True)
    return torch.zeros_like(inputs) if gradient is None else gradient  # (N, ...)
