"""Which linear map belongs to which operation of a forward pass: shapes, sums, products, matrices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gradveil.layers.operators import Dense, Mean, Operator, Permute, Reshape, Scale, normal_dims, pad_along, wide

Edges = list[tuple[Tensor, Operator]]  # an input that matters, and the map from its changes to the output's


@dataclass(frozen=True)
class Call:
    """One operation of a forward pass, as it was called."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    outs: tuple[Any, ...]
    depends: Callable[[Any], bool]  # on the model's input

    @property
    def x(self) -> Any:
        """The first argument."""
        return self.args[0]

    @property
    def out(self) -> Tensor:
        """The (first) output."""
        found: Tensor = self.outs[0]
        return found

    def arg(self, place: int, name: str, default: Any) -> Any:
        """Return an argument given by place or by name, or its default."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Rule = Callable[[Call], Edges | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Make a rule known for operations of these names; the same rule serves an operation that works in place."""

    def remember(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return remember


def scaled(x: Tensor, by: Tensor | float, out: Tensor) -> Edges | None:
    """Return the edge of an operation whose output is ``by`` times its input, each broadcast to the output."""
    if x.ndim != out.ndim or x.shape[0] != out.shape[0]:
        return None  # broadcast along examples
    if isinstance(by, Tensor) and by.ndim:
        by = wide(by).to(wide(out).dtype)
        return [(x, Scale(by, tuple(x.shape), tuple(out.shape)))]
    return [(x, Scale(float(by), tuple(x.shape), tuple(out.shape)))]


def _joined(edges: list[Edges | None]) -> Edges | None:
    return None if any(e is None for e in edges) else [edge for e in edges if e is not None for edge in e]


@rule("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "clone", "alias", "contiguous", "_to_copy")
def _same_entries(call: Call) -> Edges | None:
    if not (call.x.ndim and call.out.ndim):
        return None
    return [(call.x, Reshape(tuple(call.x.shape), tuple(call.out.shape)))]


@rule("permute", "transpose", "t")
def _permute(call: Call) -> Edges | None:
    x, *rest = call.args
    if rest and not isinstance(rest[0], int):
        dims = [d % x.ndim for d in rest[0]]
    else:
        first, second = (d % x.ndim for d in (rest or (0, -1)))
        dims = list(range(x.ndim))
        dims[first], dims[second] = second, first
    return [(x, Permute(tuple(dims), tuple(x.shape)))]


@rule("add")
def _add(call: Call) -> Edges | None:
    return _sum(call, 1, call.arg(2, "alpha", 1))


@rule("sub")
def _sub(call: Call) -> Edges | None:
    return _sum(call, 1, -call.arg(2, "alpha", 1))


@rule("rsub")
def _rsub(call: Call) -> Edges | None:
    return _sum(call, -call.arg(2, "alpha", 1), 1)


def _sum(call: Call, *factors: float) -> Edges | None:
    pairs = zip(call.args[:2], factors, strict=True)
    return _joined([scaled(a, factor, call.out) for a, factor in pairs if call.depends(a)])


@rule("neg")
def _neg(call: Call) -> Edges | None:
    return scaled(call.x, -1.0, call.out)


@rule("mul")
def _mul(call: Call) -> Edges | None:
    a, b = call.args[:2]
    return _joined([scaled(x, _fixed(by), call.out) for x, by in ((a, b), (b, a)) if call.depends(x)])


@rule("div")
def _div(call: Call) -> Edges | None:
    a, b = call.args[:2]
    return None if call.kwargs or call.depends(b) else scaled(a, 1 / _fixed(b), call.out)


def _fixed(by: Any) -> Any:
    return wide(by).clone() if isinstance(by, Tensor) else by  # a copy: the model may write to its own


@rule("cat")
def _cat(call: Call) -> Edges | None:
    tensors, out = call.x, call.out
    dim = call.arg(1, "dim", 0) % out.ndim
    if dim == 0:
        return None
    edges: Edges = []
    start = 0
    for tensor in tensors:
        size = tensor.shape[dim]
        if call.depends(tensor):
            edges.append((tensor, pad_along(dim, start, out.shape[dim] - start - size, out.ndim)))
        start += size
    return edges


@rule("slice")
def _slice(call: Call) -> Edges | None:
    x, dim = call.x, call.arg(1, "dim", 0) % call.x.ndim
    start = min(call.arg(2, "start", 0) or 0, x.shape[dim])
    if call.arg(4, "step", 1) != 1 or dim == 0:
        return None
    before = start + x.shape[dim] if start < 0 else start
    after = x.shape[dim] - before - call.out.shape[dim]
    return [(x, pad_along(dim, -before, -after, x.ndim))]


@rule("constant_pad_nd")
def _pad(call: Call) -> Edges | None:
    from gradveil.layers.operators import Pad

    amounts = tuple(call.args[1])
    return None if len(amounts) >= 2 * call.x.ndim else [(call.x, Pad(amounts))]


@rule("mean")
def _mean(call: Call) -> Edges | None:
    return _average(call, mean=True)


@rule("sum")
def _total(call: Call) -> Edges | None:
    return _average(call, mean=False)


def _average(call: Call, mean: bool) -> Edges | None:
    x, over = call.x, call.arg(1, "dim", None)
    if not over:
        return None
    dims = normal_dims([over] if isinstance(over, int) else over, x.ndim)
    if dims[0] == 0:
        return None  # examples would mix
    count = 1
    for d in dims:
        count *= x.shape[d]
    return [(x, Mean(dims, bool(call.arg(2, "keepdim", False)), tuple(x.shape), 1 / count if mean else 1.0))]


@rule("addmm")
def _addmm(call: Call) -> Edges | None:
    bias, x, weight = call.args[:3]
    return None if call.kwargs or call.depends(bias) else _dense(call, x, weight.t())


@rule("mm")
def _mm(call: Call) -> Edges | None:
    return _dense(call, call.x, call.args[1].t())


@rule("linear")
def _linear(call: Call) -> Edges | None:
    return None if any(map(call.depends, call.args[2:])) else _dense(call, call.x, call.args[1])


def _dense(call: Call, x: Tensor, weight: Tensor) -> Edges | None:
    if not call.depends(x) or any(call.depends(a) for a in call.args if a is not x):
        return None
    return [(x, Dense(wide(weight.detach()), tuple(x.shape[:-1])))]
