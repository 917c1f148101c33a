"""``moment``: one forward pass with squared weights stands for all row norms."""

import math
from functools import lru_cache, reduce

import torch
from torch import Tensor

from gradveil.representation.layers.jacobian import Jacobian, Tape
from gradveil.representation.layers.rules.base import wide
from gradveil.representation.scores.exact import RowNorms, stack_norms
from gradveil.seeds import Seeds


def moment_rows(tape: Tape) -> RowNorms:
    """Return r and sqrt of s, where s starts as ones and each layer A maps it to (A∘A) s.

    That is diag(JJᵀ) with all cross terms left out: exact where every input reaches an entry by one path only, right on
    average where weights have independent random signs, and off where training has made paths add up.
    """
    return RowNorms(tape.r.flatten(1), {2.0: tape.spread().flatten(1).sqrt()})


def sketch_rows(jacobian: Jacobian, probes: int, seed: int, memory: int) -> RowNorms:
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
    return RowNorms(r.detach().flatten(1), {2.0: total / math.sqrt(probes)})


@lru_cache(maxsize=4)
def random_signs(probes: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return signs (K, *shape), the same for the same seed on every device. Kept, so never write to them."""
    signs = torch.randint(0, 2, (probes, *shape), generator=Seeds(seed)("probes"), dtype=torch.int8)
    return signs.to(device).to(dtype).mul_(2).sub_(1)


def deflation_rows(jacobian: Jacobian, probes: int, seed: int, memory: int) -> RowNorms:
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
    return RowNorms(r.detach().flatten(1), {2.0: total})


def _norms(jacobian: Jacobian, directions: Tensor, step: int) -> Tensor:
    """Return sqrt Σ_k (J v_k)² (N, L) for directions (N, d, K)."""
    stack = directions.permute(2, 0, 1).reshape(-1, *jacobian.x.shape)  # (K, N, *x)
    parts = [stack_norms(jacobian.push(part), (2.0,))[0] for part in stack.split(step)]
    return reduce(torch.hypot, parts)
