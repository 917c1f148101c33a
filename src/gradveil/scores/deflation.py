"""``deflation``: take out the few directions that carry most of the Jacobian, and sketch the rest."""

import math
from functools import reduce

import torch
from torch import Tensor

from gradveil.scores.jacobian import Jacobian
from gradveil.scores.rows import Rows, stack_norms, wide
from gradveil.scores.sketch import random_signs


def deflation_rows(jacobian: Jacobian, probes: int, seed: int, memory: int) -> Rows:
    """Return r and estimates of ||∂r_i/∂x||_2 from ``probes`` products with J in all.

    With m = probes / 3: Q spans Jᵀ of m random vectors, and ||g||² = ||Qᵀg||² + ||(I - QQᵀ)g||²; the first is exact
    (m products), the second is sketched with m probes projected off Q. The idea of Hutch++ (Meyer et al. 2021), for
    each diagonal entry of JJᵀ. Exact where J has rank m or less; best where few directions dominate, as after training.
    """
    x, r = jacobian.x, jacobian.r
    m = max(1, min(probes // 3, x[0].numel()))
    step = jacobian.at_once(memory)
    tests = random_signs(m, tuple(r.shape[1:]), seed, wide(x).dtype, str(x.device))
    pulled = torch.cat([jacobian.pull(part[:, None].expand(-1, *r.shape)) for part in tests.split(step)])
    q = torch.linalg.qr(wide(pulled).flatten(2).permute(1, 2, 0)).Q  # (N, d, m)
    signs = random_signs(m, tuple(x.shape[1:]), seed + 1, wide(x).dtype, str(x.device)).flatten(1)  # (m, d)
    rest = signs.t() - q @ (q.transpose(1, 2) @ signs.t())  # (N, d, m)
    total = torch.hypot(_norms(jacobian, q, step), _norms(jacobian, rest, step) / math.sqrt(m))
    return Rows(r.detach().flatten(1), {2.0: total})


def _norms(jacobian: Jacobian, directions: Tensor, step: int) -> Tensor:
    """Return sqrt Σ_k (J v_k)² (N, L) for directions (N, d, K)."""
    stack = directions.permute(2, 0, 1).reshape(-1, *jacobian.x.shape)  # (K, N, *x)
    parts = [stack_norms(jacobian.push(part), (2.0,))[0] for part in stack.split(step)]
    return reduce(torch.hypot, parts)
