"""A forward pass written down as linear maps: tensors are nodes, operations are edges between them."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradveil.layers.jacobian import Jacobian
from gradveil.layers.operators import Operator, Scale, Shape, wide


@dataclass(frozen=True)
class Edge:
    """A small change of node ``source`` changes this node by ``operator`` times it."""

    source: int
    operator: Operator


@dataclass(frozen=True)
class Node:
    """A tensor of the forward pass that depends on the input: node 0."""

    shape: Shape
    edges: tuple[Edge, ...]
    unknown: str = ""  # the operation that made it, where that has no linear map here


@dataclass(frozen=True)
class Tape(Jacobian):
    """The nodes that lead from the input (the first) to the representation (the last)."""

    nodes: tuple[Node, ...]
    x: Tensor  # (N, ...)
    r: Tensor  # (N, ...)

    def push(self, t: Tensor) -> Tensor:
        """Return Jt (K, N, *r) for tangents t (K, N or 1, *x)."""
        out = self._forward(wide(t), lambda operator, value: operator.push(value))
        return out.expand(-1, *self.r.shape)

    def spread(self) -> Tensor:
        """Return the squared row norms (N, *r) with cross terms left out: each map squared, from all ones."""
        ones = torch.ones(1, 1, *self.x.shape[1:], dtype=wide(self.x).dtype, device=self.x.device)
        out = self._forward(ones, lambda operator, value: operator.spread(value))
        return out.expand(-1, *self.r.shape)[0]

    def pull(self, g: Tensor) -> Tensor:
        """Return Jᵀg (K, N, *x) for cotangents g (K, N, *r)."""
        return self.pull_from(len(self.nodes) - 1, wide(g)).expand(-1, *self.x.shape)

    @torch.no_grad()
    def pull_from(self, start: int, g: Tensor, *, any_order: bool = False) -> Tensor:
        """Return what cotangents g (K, n, ...) of one node come to at the input; n stays 1 where nothing tells apart.

        ``any_order``: the entries of the answer may be permuted, with zeros between, where that is cheaper.
        """
        uses = Counter(edge.source for node in self.nodes[1 : start + 1] for edge in node.edges)
        waiting: dict[int, Tensor] = {start: g}
        for at in range(start, 0, -1):
            if at not in waiting:
                continue
            value = waiting.pop(at)
            for edge in self.nodes[at].edges:
                source, operator = edge.source, edge.operator
                below = self.nodes[source].edges
                if uses[source] == 1 and len(below) == 1 and isinstance(below[0].operator, Scale):
                    part, source = operator.pull_scaled(value, below[0].operator), below[0].source
                elif any_order and source == 0 and uses[source] == 1:
                    part = operator.pull_any(value)
                else:
                    part = operator.pull(value)
                waiting[source] = waiting[source] + part if source in waiting else part
        return waiting[0] if 0 in waiting else g.new_zeros(g.shape[0], *self.x.shape)

    @torch.no_grad()
    def _forward(self, start: Tensor, apply: Callable[[Operator, Tensor], Tensor]) -> Tensor:
        values: list[Tensor | None] = [start]
        last_use = {edge.source: at for at, node in enumerate(self.nodes) for edge in node.edges}
        for at, node in enumerate(self.nodes[1:], start=1):
            total: Tensor | None = None
            for edge in node.edges:
                part = apply(edge.operator, _present(values[edge.source]))
                total = part if total is None else total + part
            values.append(total)
            for edge in node.edges:
                if last_use[edge.source] == at:
                    values[edge.source] = None
        return _present(values[-1])

    @property
    def widest(self) -> int:
        """Entries of the largest tensor on the way, of all examples together."""
        return max(prod(node.shape) for node in self.nodes)

    @property
    def cost(self) -> int:
        """Multiplications that one product with J takes for one example."""
        return sum(edge.operator.cost for node in self.nodes for edge in node.edges)


def _present(value: Tensor | None) -> Tensor:
    assert value is not None  # every node but the first has an edge, and is read before it is let go
    return value


def needed(nodes: list[Node], end: int) -> Iterator[int]:
    """Yield, in order, the nodes that node ``end`` is made from, and itself."""
    wanted = {end}
    for at in range(end, -1, -1):
        if at in wanted:
            wanted.update(edge.source for edge in nodes[at].edges)
    yield from sorted(wanted)


def cut(nodes: list[Node], end: int, x: Tensor, r: Tensor) -> Tape | str:
    """Return the tape that leads to node ``end``, or the name of an operation on the way that has no linear map."""
    kept = list(needed(nodes, end))
    place = {old: new for new, old in enumerate(kept)}
    for at in kept:
        if nodes[at].unknown:
            return nodes[at].unknown
    moved = [
        Node(nodes[at].shape, tuple(Edge(place[edge.source], edge.operator) for edge in nodes[at].edges)) for at in kept
    ]
    return Tape(tuple(moved), x, r)
