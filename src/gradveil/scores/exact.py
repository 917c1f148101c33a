"""Exact row norms of any model: vectorised backward passes in chunks, on one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradveil.layers.jacobian import Jacobian, Tape
from gradveil.layers.rules.base import wide
from gradveil.scores.rows import RowNorms, add_norms, reduce_norms, stack_norms


def generic_rows(jacobian: Jacobian, ps: Sequence[float], memory: int) -> RowNorms:
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
            found = found.new_zeros(n, length).scatter_(1, order[:, :count], found.expand(n, -1))
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
