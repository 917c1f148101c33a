"""Row norms of the Jacobian of a representation, ||∂r_i/∂x||_p of every entry: exact ones, and estimates."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod

import torch
from torch import Tensor

from gradveil.representation.jacobian import Jacobian, Tape
from gradveil.representation.rules.base import wide
from gradveil.seeds import Seeds

NORMS = (1.0, 2.0, inf)  # the p that exact methods know; estimators know 2 only
TINY = 1e-17  # squares of smaller float32 numbers lose digits, or are zero


@dataclass(frozen=True)
class RowNorms:
    """r and, for each p asked for, ||∂r_i/∂x||_p of every entry."""

    r: Tensor  # (N, L)
    norms: dict[float, Tensor]  # p -> (N, L)


def reduce_norms(g: Tensor, ps: Sequence[float]) -> list[Tensor]:
    """Return the p-norms of g (K, N, ...) over all but its first two dimensions, each (K, N)."""
    order = sorted(range(2, g.ndim), key=g.stride, reverse=True)  # as it lies in memory: no copy
    flat = wide(g).permute(0, 1, *order).flatten(2)
    if not flat.shape[2]:
        return [flat.new_zeros(flat.shape[:2]) for _ in ps]
    return [_checked(lambda t, p=p: torch.linalg.vector_norm(t, p, dim=2), flat, p) for p in ps]  # type: ignore[misc]


def stack_norms(stack: Tensor, ps: Sequence[float]) -> list[Tensor]:
    """Return the p-norms over the first dimension of a stack (K, N, ...), each (N, L)."""
    flat = wide(stack).flatten(2)
    reduce: dict[float, Callable[[Tensor], Tensor]] = {
        1.0: lambda t: t.abs().sum(0),
        2.0: lambda t: t.square().sum(0).sqrt(),  # ten times as fast as the norm over a first dimension
        inf: lambda t: t.abs().amax(0),
    }
    return [_checked(reduce[p], flat, p) for p in ps]


def _checked(norm: Callable[[Tensor], Tensor], flat: Tensor, p: float) -> Tensor:
    """Return a norm; once more in double precision where squares of small numbers have lost digits."""
    found = norm(flat)
    if p != 2 or flat.dtype != torch.float32:
        return found
    if flat.is_cuda and torch.cuda.is_current_stream_capturing():  # no look at values while a call is recorded
        return found
    return norm(flat.double()).float() if bool((found < TINY).any()) else found


def add_norms(a: Tensor, b: Tensor, p: float) -> Tensor:
    """Return the p-norm of two vectors put end to end, from their norms."""
    if p == inf:
        return torch.maximum(a, b)
    return torch.hypot(a, b) if p == 2 else a + b


def generic_rows(jacobian: Jacobian, ps: Sequence[float], memory: int) -> RowNorms:
    """Return r and the norms of all rows, ``memory`` bytes of gradients at a time (Sun et al. 2020, algorithm 1).

    One backward pass serves all examples: with batch statistics held, r of one example depends on its own input only.
    """
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
    return RowNorms(r.flatten(1), norms)


_IN_CACHE = 2**19  # entries of the widest layer that one chunk holds on a CPU


@dataclass(frozen=True)
class Start:
    """Where the rows begin: each entry of r is ``factor`` times the entry ``index`` of one node.

    Activations and max pooling at the end only scale and choose rows, so rows need not pass through them.
    """

    node: int
    index: Tensor  # (n, L): flat positions in the node; n is 1 or N
    factor: Tensor  # (n, L)

    @classmethod
    def of(cls, tape: Tape) -> "Start":
        """Return the earliest node of which r is a choice of scaled entries."""
        at, length = len(tape.nodes) - 1, tape.r[0].numel()
        index = torch.arange(length, device=tape.r.device)[None]
        factor = torch.ones(1, length, dtype=wide(tape.r).dtype, device=tape.r.device)
        while len(tape.nodes[at].edges) == 1:
            (edge,) = tape.nodes[at].edges
            traced = edge.operator.trace(index, factor)
            if traced is None:
                break
            at, (index, factor) = edge.source, traced
        return cls(at, index, factor)


def exact_rows(tape: Tape, ps: Sequence[float], memory: int, *, skip: bool = True) -> RowNorms:
    """Return r and the norms of all rows, from whichever side of the Jacobian is the shorter.

    ``skip``: look for rows that are zero whatever comes before (dead units) and leave them out. The answer is the
    same; looking waits for the device.
    """
    _keep_memory(tape.x)
    if tape.x[0].numel() < tape.r[0].numel():
        return _by_columns(tape, ps, memory)
    return _by_rows(tape, ps, memory, skip)


def _by_rows(tape: Tape, ps: Sequence[float], memory: int, skip: bool) -> RowNorms:
    n, length = tape.r.shape[0], tape.r[0].numel()
    start = Start.of(tape)
    order, count = live_first(start.factor) if skip else (None, length)
    index = start.index if order is None else start.index.expand(n, -1).gather(1, order[:, :count])
    step = tape.at_once(memory, _IN_CACHE)
    parts = [_pulled(tape, start.node, index[:, at : at + step].t(), ps) for at in range(0, count, step)]
    norms = {}
    for k, p in enumerate(ps):
        found = torch.cat([part[k] for part in parts]).t() if parts else start.factor.new_zeros(n, 0)
        if order is not None:
            found = found.new_zeros(n, length).scatter_(1, order[:, :count].expand(n, -1), found.expand(n, -1))
        norms[p] = (found * start.factor.abs()).expand(n, -1)
    return RowNorms(tape.r.flatten(1), norms)


def live_first(factor: Tensor) -> tuple[Tensor | None, int]:
    """Return an order of entries with the live ones of each example first, and how many any example has."""
    live = factor != 0
    if bool(live.all()):
        return None, factor.shape[1]
    return live.logical_not().to(torch.uint8).argsort(dim=1, stable=True), int(live.sum(1).max())


def _pulled(tape: Tape, node: int, index: Tensor, ps: Sequence[float]) -> list[Tensor]:
    """Return, for each p, the norms (K, n) of the rows of a node at flat positions (K, n)."""
    edges = tape.nodes[node].edges
    rows = edges[0].operator.rows(index) if len(edges) == 1 else None
    if rows is not None:
        node = edges[0].source
    else:
        shape = tape.nodes[node].shape[1:]
        units = torch.zeros(*index.shape, prod(shape), dtype=wide(tape.r).dtype, device=index.device)
        rows = units.scatter_(2, index[..., None], 1.0).view(*index.shape, *shape)
    return reduce_norms(tape.pull_from(node, rows, any_order=True) if node else rows, ps)


def _by_columns(tape: Tape, ps: Sequence[float], memory: int) -> RowNorms:
    x, r = tape.x, tape.r
    size, n, length = x[0].numel(), r.shape[0], r[0].numel()
    totals = {p: torch.zeros(n, length, dtype=wide(r).dtype, device=r.device) for p in ps}
    step = tape.at_once(memory, _IN_CACHE)
    for at in range(0, size, step):
        count = min(step, size - at)
        units = torch.zeros(count, size, dtype=wide(x).dtype, device=x.device)
        units.diagonal(at).fill_(1.0)
        part = tape.push(units.view(count, 1, *x.shape[1:]))  # (K, N, *r)
        for p, more in zip(ps, stack_norms(part, ps), strict=True):
            totals[p] = add_norms(totals[p], more, p)
    return RowNorms(r.flatten(1), totals)


def _keep_memory(x: Tensor) -> None:
    """Make the C library keep what chunks free, for the next chunk, instead of giving it back page by page.

    glibc raises its limits for that to the size of the largest block freed so far (up to 32 MiB); the block itself
    is never touched, so it costs nothing. Worth a factor of 1.5 on LeNet.
    """
    if not x.is_cuda:
        torch.empty(31 * 2**20, dtype=torch.uint8)


def scores(r: Tensor, norms: dict[float, Tensor], p: float) -> Tensor:
    """Return |r_i| ||g||_p / ||g||_2², the p-norm of r_i times the pseudo-inverse of the row g = ∂r_i/∂x.

    For p = 2 that is |r_i| / ||g||_2 (Sun et al. 2020, algorithm 1). An entry that is zero scores 0; one that is
    not, with a gradient of zero, scores +inf.
    """
    size, two = wide(r).abs(), norms[2.0]
    found = size / two  # a gradient of zero: inf, or NaN where r is zero as well
    if p != 2:
        found = torch.where(two == 0, found, found * (norms[p] / two))
    return found.masked_fill_(r == 0, 0.0)


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
