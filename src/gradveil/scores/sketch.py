"""``sketch``: a few random directions estimate the norms of all rows at once."""

import math
from functools import lru_cache

import torch
from torch import Tensor

from gradveil.scores.jacobian import Jacobian
from gradveil.scores.rows import Rows, stack_norms, wide
from gradveil.seeds import Seeds


def sketch_rows(jacobian: Jacobian, probes: int, seed: int, memory: int) -> Rows:
    """Return r and estimates of ||∂r_i/∂x||_2: the root mean square of ∂r_i/∂x · v over random signs v.

    E (g · v)² = ||g||², so k probes give a norm up to about 1 / sqrt(2k). All examples share the probes: the first
    layer is passed once, and errors of different examples go together.
    """
    x, r = jacobian.x, jacobian.r
    signs = random_signs(probes, tuple(x.shape[1:]), seed, wide(x).dtype, str(x.device))
    step = jacobian.at_once(memory)
    total = torch.zeros(r.shape[0], r[0].numel(), dtype=wide(r).dtype, device=r.device)
    for at in range(0, probes, step):
        total = torch.hypot(total, stack_norms(jacobian.push(signs[at : at + step, None]), (2.0,))[0])
    return Rows(r.detach().flatten(1), {2.0: total / math.sqrt(probes)})


@lru_cache(maxsize=4)
def random_signs(probes: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return signs (K, *shape), the same for the same seed on every device. Kept, so never write to them."""
    signs = torch.randint(0, 2, (probes, *shape), generator=Seeds(seed)("probes"), dtype=torch.int8)
    return signs.to(device).to(dtype).mul_(2).sub_(1)
