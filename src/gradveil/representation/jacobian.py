"""The Jacobian of a representation as two products: with cotangents (pull) and with tangents (push).

Explicit as a tape, where tensors are nodes and operations are linear maps between them; else by differentiation.
"""

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, count, islice
from math import comb, prod

import torch
from torch import Tensor, nn
from torch.func import vmap

from gradveil.errors import ScoreError
from gradveil.modules import plain_attention, prefix
from gradveil.representation.rules.arithmetic import Scale
from gradveil.representation.rules.base import Operator, Shape, wide


class Jacobian(ABC):
    """∂r_n/∂x_n for every example n, never written out.

    Many vectors are multiplied at once: K comes first, then the examples. Where all examples share a tangent,
    the second dimension may be 1.
    """

    r: Tensor  # (N, ...)
    x: Tensor  # (N, ...)

    @property
    def widest(self) -> int:
        """Entries of the largest tensor on the way, of all examples together."""
        return max(self.x.numel(), self.r.numel())

    def at_once(self, memory: int, in_cache: int = 2**21) -> int:
        """Return how many vectors to carry at once: within the memory (bytes), and (entries) a CPU's cache."""
        entries = memory // (8 * self.x.element_size())  # about eight tensors live at a time
        if not self.x.is_cuda:
            entries = min(entries, in_cache)
        return max(1, entries // max(1, self.widest))

    @abstractmethod
    def pull(self, g: Tensor) -> Tensor:
        """Return Jᵀg (K, N, *x) for cotangents g (K, N, *r)."""

    @abstractmethod
    def push(self, t: Tensor) -> Tensor:
        """Return Jt (K, N, *r) for tangents t (K, N or 1, *x)."""

    @property
    def separate(self) -> bool:
        """Whether no operation on the way could mix examples, whatever the numbers."""
        return False

    def check_examples(self) -> None:
        """Raise where r_n depends on the input of another example, so that ∂r_n/∂x_n is not all there is.

        Each cotangent lies on some examples and must stay there. Of any two examples, some cotangent holds the one
        and not the other: sets of equal size, none of which contains another.
        """
        n = len(self.r)
        if n == 1:
            return
        size = next(k for k in count(1) if comb(k, k // 2) >= n)
        held = torch.zeros(size, n, dtype=torch.bool)  # (K, N)
        for example, places in enumerate(islice(combinations(range(size), size // 2), n)):
            held[list(places), example] = True
        noise = torch.randn(self.r.shape, generator=torch.Generator().manual_seed(0)).to(self.r)
        for some in held.to(self.r.device).split(self.at_once(2**29)):
            pulled = self.pull(some.view(*some.shape, *[1] * (self.r.ndim - 1)) * noise)
            if bool((pulled.flatten(2).abs().amax(2) > 0)[~some].any()):  # not so for NaN
                raise ScoreError(
                    "The forward pass mixes the examples of a batch before this layer (a mean, a softmax or attention "
                    "over the first dimension?), so no entry belongs to one example. Normalise with nn.BatchNorm, "
                    "detach what is taken over the batch, or give one example at a time."
                )

    def check_seen(self, seen: Tensor | None) -> None:
        """Raise where r is another representation than the one seen before, rounding aside."""
        if seen is None or _changed.get():
            return
        off = (wide(self.r.detach()).flatten() - seen.detach().flatten()).abs().max()
        if bool(off > _SAME * seen.abs().max()):
            raise ScoreError(
                f"The model gives another representation when it runs on the same batch again (off by {float(off):.2g})"
                ", so its scores would be those of another pass: it counts its calls, or draws random numbers that are "
                "not torch's own. Keep what changes in buffers, and draw from torch's default generator."
            )


_SAME = 0.05  # of the largest entry: what half precision may do to a representation
_changed = ContextVar("changed", default=False)


@contextmanager
def already_changed() -> Iterator[None]:
    """Within, the representation that was seen is what another defence left of the model's own."""
    token = _changed.set(True)
    try:
        yield
    finally:
        _changed.reset(token)


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


@dataclass(frozen=True)
class Tape(Jacobian):
    """The nodes that lead from the input (the first) to the representation (the last)."""

    nodes: tuple[Node, ...]
    x: Tensor  # (N, ...)
    r: Tensor  # (N, ...)

    def push(self, t: Tensor) -> Tensor:
        out = self._forward(wide(t), lambda operator, value: operator.push(value))
        return out.expand(-1, *self.r.shape)

    def spread(self) -> Tensor:
        """Return the squared row norms (N, *r) with cross terms left out: each map squared, from all ones."""
        ones = torch.ones(1, 1, *self.x.shape[1:], dtype=wide(self.x).dtype, device=self.x.device)
        out = self._forward(ones, lambda operator, value: operator.spread(value))
        return out.expand(-1, *self.r.shape)[0]

    def pull(self, g: Tensor) -> Tensor:
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

    def chain(self, start: int) -> list[Operator] | None:
        """Return the maps from a node back to the input, where they are one chain; else None."""
        operators: list[Operator] = []
        while start:
            if len(self.nodes[start].edges) != 1:
                return None
            (edge,) = self.nodes[start].edges
            operators.append(edge.operator)
            start = edge.source
        return operators

    @property
    def widest(self) -> int:
        return max(prod(node.shape) for node in self.nodes)

    @property
    def separate(self) -> bool:
        return all(edge.operator.separate for node in self.nodes for edge in node.edges)

    @property
    def cost(self) -> int:
        """Multiplications that one product with J takes for one example."""
        edges = (edge for node in self.nodes for edge in node.edges)
        # the first dimension may count more than the examples: all tokens of all of them
        return sum(edge.operator.cost * self.nodes[edge.source].shape[0] for edge in edges) // max(1, len(self.x))


def _present(value: Tensor | None) -> Tensor:
    assert value is not None  # every node but the first has an edge, and is read before it is let go
    return value


class FunctionJacobian(Jacobian):
    """Of any model: one forward pass, and vectorised products by automatic differentiation.

    The forward pass is a plain one, not one under a transform: dropout would draw other masks there. ``plainly``: the
    products as well, one by one, where hooks of the model see gradients.
    """

    def __init__(self, model: nn.Module, layer: str, x: Tensor, *, plainly: bool = False) -> None:
        # Whether many rows may be pulled, or pushed, at once; absent: not tried yet.
        self._at_once: dict[str, bool] = {"pull": False, "push": False} if plainly else {}
        with torch.enable_grad(), plain_attention():
            self.x = x.detach().requires_grad_()
            self.r = prefix(model, layer)(self.x)
        if not self.r.requires_grad:
            raise ScoreError(
                f"The input of layer {layer!r} does not depend on x in a way that torch differentiates, so it has no "
                f"scores: it is made under no_grad, detached, or from whole numbers. Freeze weights with "
                f"requires_grad_(False) in place of no_grad, and give embeddings in place of token ids, or "
                f"defend text with veil, gaussian or pruning."
            )

    def pull(self, g: Tensor) -> Tensor:
        return self._each("pull", lambda row: _gradient(self.r, self.x, row), g.to(self.r.dtype))

    def push(self, t: Tensor) -> Tensor:
        # Jᵀg is linear in g, and the transpose of that is J: no second forward pass, so dropout masks are the same.
        tangents = t.to(self.x.dtype).expand(-1, *self.x.shape)
        try:
            g, pulled = self._pulled
            return self._each("push", lambda row: _gradient(pulled, g, row), tangents)
        except RuntimeError as error:
            raise ScoreError(
                f"Estimators differentiate this model twice, which torch cannot ({error}). Use method='exact'."
            ) from error

    @cached_property
    def _pulled(self) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), plain_attention():
            g = torch.zeros_like(self.r, requires_grad=True)
            (pulled,) = torch.autograd.grad(self.r, self.x, g, create_graph=True, materialize_grads=True)
            return g, pulled

    def _each(self, way: str, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Apply a linear function to every row at once, or one by one where some operation cannot be vectorised.

        Some are vectorised wrongly (``cdist``): the sum of the first stack is compared.
        """
        with plain_attention(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            if self._at_once.get(way, True):
                try:
                    found: Tensor = vmap(function)(rows)
                except RuntimeError:
                    self._at_once[way] = False
                else:
                    if way not in self._at_once:
                        self._at_once[way] = _adds_up(found, function(rows.sum(0)))
                    if self._at_once[way]:
                        return found
            return torch.stack([function(row) for row in rows])


def _adds_up(parts: Tensor, whole: Tensor) -> bool:
    """Whether parts (K, ...) add up to the whole (...), rounding aside; NaN is like anything."""
    within = max(1e-6, 1000 * torch.finfo(parts.dtype).eps) * len(parts) ** 0.5
    return not parts.numel() or not bool((parts.sum(0) - whole).abs().amax() > within * parts.abs().amax())


def _gradient(output: Tensor, of: Tensor, weights: Tensor) -> Tensor:
    if not output.requires_grad:
        return torch.zeros_like(of)  # J is constant
    return torch.autograd.grad(output, of, weights, retain_graph=True, materialize_grads=True)[0]
