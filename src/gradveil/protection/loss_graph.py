"""A loss's graph: whether it is a mean of one loss per record, and whether going back keeps the records apart."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from gradveil.errors import DefenseError

# Each entry of the output depends on the same entry of the inputs, or on the same rows.
_BY_ENTRIES = frozenset(
    f"{name}Backward0"
    for name in (
        "Abs", "Add", "Alias", "Clamp", "ClampMax", "ClampMin", "Clone", "Div", "Exp", "Hardtanh", "LeakyRelu",
        "Log", "Log1P", "LogSigmoid", "MaskedFill", "Maximum", "Minimum", "Mul", "Neg", "Pow", "Relu", "Rsqrt", "Rsub",
        "Sigmoid", "Silu", "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy", "Where",
    )
) | {"AddBackward1", "DivBackward1", "MulBackward1", "SubBackward1"}  # fmt: skip
_VIEWS = {
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "UnsqueezeBackward0", "ExpandBackward0",
}  # fmt: skip
_ALONG = {
    "GatherBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "LogsumexpBackward0", "SelectBackward0",
    "SliceBackward0", "SumBackward1", "MeanBackward1", "LinalgVectorNormBackward0",
}  # fmt: skip
_LOSSES = {
    "NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0",
    "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0", "SoftMarginLossBackward0",
}  # fmt: skip
_FACTORS = {"MulBackward0", "MulBackward1", "DivBackward0", "DivBackward1"}
_MEAN, _SUM = 1, 2  # reductions, as torch numbers them


@dataclass(frozen=True)
class Share:
    """How a loss is made of the records' own: Σ_j weight · l_j."""

    weight: float
    times: float  # the mean over the records; 1: it is the mean itself


def share_of(loss: Tensor, stops: set[Node], count: int, known_mean: bool) -> Share:
    """Return what each of ``count`` records' own loss counts in a loss, down to the ``stops``: what a model gave.

    A record's own loss is the mean over its entries, with the weights that the loss gives them. Raises
    ``DefenseError`` where the graph does not say that records are kept apart; ``known_mean``: the user does.
    """
    assert loss.grad_fn is not None
    factor, node = _factors(loss.grad_fn, stops)
    if known_mean or node in stops:
        return Share(factor / count, factor)
    walk = _Walk(stops, count)
    walk.number(node)
    weight, is_mean = walk.reduced
    return Share(factor * weight, factor if is_mean else factor * weight * count)


def _factors(node: Node, stops: set[Node]) -> tuple[float, Node]:
    """Return the product of the numbers that a loss is multiplied by last, and what they multiply."""
    factor = 1.0
    while node not in stops and (found := _factor(node)) is not None:
        factor, node = factor * found[0], found[1]
    return factor, node


def _factor(node: Node) -> tuple[float, Node, bool] | None:
    """Return the number that a node multiplies by, what it multiplies, and whether the number is none of a tensor's.

    None: it does something else. A plain number is held as one of the widest type.
    """
    into = list(_into(node))
    if node.name() not in _FACTORS or len(into) != 1 or tuple(_shape(into[0])):
        return None
    numbers = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    number = next((n for n in numbers if n is not None), None)
    if number is None or (isinstance(number, Tensor) and number.numel() != 1):
        return None
    value = abs(float(number))
    is_plain = not isinstance(number, Tensor) or number.dtype in (torch.float64, torch.int64, torch.bool)
    return (value if node.name().startswith("Mul") else 1 / value if value else 0.0), into[0], is_plain


def _into(node: Node) -> Iterator[Node]:
    return (child for child, _ in node.next_functions if child is not None)


class _Walk:
    """From a number back to what the model gave, refusing on the way what may mix records."""

    def __init__(self, stops: set[Node], count: int) -> None:
        self.stops, self.count = stops, count
        self.found: list[tuple[float, bool]] = []  # what a record's own loss counts, and whether it is a mean
        self.seen: set[Node] = set()

    @property
    def reduced(self) -> tuple[float, bool]:
        """The first mean there is; of losses that are none, the first.

        A mean that weighs or leaves out some entries counts by the labels of all records. By itself that cancels; in a
        sum with another it does not.
        """
        found = next((found for found in self.found if found[1]), self.found[0])
        others = (weight if is_mean else 1 / self.count for weight, is_mean in self.found)
        if found[1] and not all(isclose(found[0], weight, rel_tol=1e-5) for weight in others):
            raise DefenseError(
                "The loss is a sum of means over different numbers of entries (class weights, ignored labels): what a "
                "record counts in it depends on the labels of the others. Take reduction='sum' and divide by a number "
                "that does not follow from the batch."
            )
        return found

    def number(self, node: Node, factor: float = 1.0) -> None:
        name = node.name()
        if (found := _factor(node)) is not None:
            if not found[2]:
                raise DefenseError(
                    "A part of the loss is multiplied by a tensor, which may follow from all records of the batch, as "
                    "a detached loss does. Multiply by a plain number that does not: 0.5."
                )
            self.number(found[1], factor * found[0])
        elif name in ("NegBackward0", "AddBackward0", "SubBackward0", "ToCopyBackward0", "AliasBackward0"):
            for child in _into(node):
                self.number(child, factor)
        elif name in ("MeanBackward0", "SumBackward0"):
            self._reduce(1 / self.count if name == "MeanBackward0" else factor, name == "MeanBackward0", node)
        elif name in _LOSSES and getattr(node, "_saved_reduction", None) in (_MEAN, _SUM):
            mean = node._saved_reduction == _MEAN  # type: ignore[attr-defined]
            self._reduce(self._mean_of(node) if mean else factor, mean, node)
        else:
            raise _unknown(name)

    def _mean_of(self, node: Node) -> float:
        """Return what a record's own mean counts in a mean over all entries, some of them weighted or left out."""
        total = getattr(node, "_saved_total_weight", None)
        if total is None or not float(total) > 0:
            return 1 / self.count
        return float(node._saved_target.numel() / self.count / total)  # type: ignore[attr-defined]

    def _reduce(self, weight: float, mean: bool, node: Node) -> None:
        self.found.append((weight, mean))
        for child in _into(node):
            self.rows(child)

    def rows(self, node: Node) -> None:
        """Go on from a tensor whose first dimension is that of the records, or is made of it and others."""
        todo = [node]
        while todo:
            node = todo.pop()
            if node in self.stops or node in self.seen:
                continue
            self.seen.add(node)
            name, shape = node.name(), _shape(node)
            whole = bool(shape) and shape[0] % self.count == 0
            along = (
                name in _BY_ENTRIES
                or name in _VIEWS
                or (name in _ALONG and 0 not in _dims(node, len(shape)))
                or (name == "TransposeBackward0" and 0 not in _dims(node, len(shape)))
                or (name == "PermuteBackward0" and _dims(node, len(shape))[0] == 0)
                or (name in _LOSSES and getattr(node, "_saved_reduction", None) == 0)
            )
            into = list(_into(node))
            if name in _BY_ENTRIES or name == "ExpandBackward0":  # what is stretched to rows may be another's
                along &= all((s := _shape(child))[:1] == shape[:1] and len(s) == len(shape) for child in into)
                along &= all(a == b or b != self.count for c in into for a, b in zip(_shape(c), shape, strict=False))
            if not (along and whole):
                raise _unknown(name)
            todo += into


def _unknown(name: str) -> DefenseError:
    return DefenseError(
        f"The loss goes through {name.removesuffix('0').removesuffix('Backward')}, and its graph does not say that it "
        f"keeps the records of a batch apart. Give targets the shape of the output. Where the loss is the mean of one "
        f"loss per record, which no other record has a part in, say so: protect(..., mean_loss=True)."
    )


def _shape(node: Node) -> tuple[int, ...]:
    return tuple(node._input_metadata[0].shape)


def _dims(node: Node, ndim: int) -> list[int]:
    found: list[int] = []
    for name in ("_saved_dim", "_saved_dims", "_saved_dim0", "_saved_dim1"):
        value = getattr(node, name, None)
        found += [] if value is None else [value] if isinstance(value, int) else list(value)
    sizes, own = getattr(node, "_saved_self_sym_sizes", None), getattr(node, "_saved_self", None)
    ndim = len(sizes) if sizes is not None else own.ndim if isinstance(own, Tensor) else ndim
    return [dim % ndim if dim < 2**63 else (dim - 2**64) % ndim for dim in found] or list(range(ndim))


def _reached(node: Node, into: Callable[[Node], Iterable[Node]] = _into) -> Iterator[Node]:
    """Yield a node and all that are on the way back from it."""
    todo, seen = [node], {node}
    while todo:
        yield (node := todo.pop())
        new = set(into(node)) - seen
        seen |= new
        todo += new


def leaves_of(loss: Tensor, layers: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """Return the ends of a loss's graph that it has beside some layers: known by what made their outputs and inputs."""
    assert loss.grad_fn is not None
    reached = _reached(loss.grad_fn, lambda node: layers[node] if node in layers else _into(node))
    return {node for node in reached if node.name().endswith("AccumulateGrad")}


def leads_to(node: Node, some: set[Node]) -> bool:
    """Whether any of some nodes is on the way back from this one."""
    return any(before in some for before in _reached(node))


MIXED = (
    "In the backward pass the gradient of a record depends on the others of its batch (a backward hook, or a function "
    "with a backward of its own): no record can be clipped by itself. Leave the hook out; limit gradients after it."
)


def check_hooks(gave: Iterable[Tensor]) -> None:
    """Raise where somebody put a hook on what the model gave: what it makes of all records' gradients is unknown."""
    if any(t._backward_hooks for t in gave):
        raise DefenseError(f"There is a hook on the model's output. {MIXED}")


def check_backward(
    loss: Tensor,
    edges: Sequence[GradientEdge],
    deltas: Sequence[Tensor | None],
    nodes: Iterable[Node],
    count: int,
    *,
    retain: bool,
) -> None:
    """Raise where half of the records get other gradients when those of the other half are zero on the way."""
    for left, half in enumerate(halves(count), -len(halves(count))):
        handles = [node.register_prehook(_kept(half, count)) for node in nodes]
        try:
            found = torch.autograd.grad(loss, edges, retain_graph=retain or left < -1, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        for own, alone in zip(deltas, found, strict=True):
            if own is None or alone is None or own.shape[:1] != (count,):
                continue
            apart = (own[half] - alone[half]).abs().max() if own.numel() else torch.zeros(())
            if bool(apart > 1e-3 * own.abs().max()):
                raise DefenseError(MIXED)


def halves(count: int) -> list[list[int]]:
    """Return halves of so many records, which part those that meet: neighbours, and those far from each other."""
    near = [list(range(start, count, 2)) for start in (0, 1)]
    far = [list(range(count // 2)), list(range(count // 2, count))]
    return [*far, *near] if count > 2 else near if count == 2 else []


def _kept(half: list[int], count: int) -> Callable[..., Any]:
    def keep(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(only(g, half) if g is not None and g.shape[:1] == (count,) else g for g in grads)

    return keep


def only(g: Tensor, half: list[int]) -> Tensor:
    """Return the rows of a half, and zeros in the place of the others."""
    kept = torch.zeros_like(g)
    kept[half] = g[half]
    return kept
