"""Exact row norms of any model: vectorised backward passes in chunks, on one forward pass."""

from collections.abc import Sequence

import torch

from gradveil.scores.jacobian import Jacobian
from gradveil.scores.rows import Rows, reduce_norms


def generic_rows(jacobian: Jacobian, ps: Sequence[float], memory: int) -> Rows:
    """Return r and the norms of all rows, ``memory`` bytes of gradients at a time."""
    r = jacobian.r.detach()
    n, length = r.shape[0], r[0].numel()
    step = jacobian.at_once(memory)
    found = []
    for start in range(0, length, step):
        count = min(step, length - start)
        units = torch.zeros(count, n, length, dtype=r.dtype, device=r.device)
        units.diagonal(offset=start, dim1=0, dim2=2).fill_(1.0)
        found.append(reduce_norms(jacobian.pull(units.view(count, *r.shape)), ps))
    norms = {p: torch.cat([part[k] for part in found]).t() for k, p in enumerate(ps)}
    return Rows(r.flatten(1), norms)
