"""Write down what a forward pass does to its input, operation by operation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradveil.certificates.bounds import stages as activations
from gradveil.certificates.bounds.stages import Activation, Conv, Curve, Dense, MaxPool, Reshape, Scale, Shape, Stage
from gradveil.errors import CertificateError

HERE = object()  # stands for the tensor that depends on the input


@dataclass(frozen=True)
class Operation:
    """One operation on a tensor that depends on the input."""

    operation: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parents: tuple["Operation", ...]
    in_shape: Shape
    out_shape: Shape
    batch_kept: bool


class OperationRecorder(TorchDispatchMode):
    """Write down every operation on tensors that depend on ``x``."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self._kept: list[Tensor] = [x]  # alive, so that no id is used twice
        shape = tuple(x.shape[1:])
        self._nodes = {id(x): Operation("input", (), {}, (), shape, shape, True)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        used = [a for a in _tensors(args) if id(a) in self._nodes]
        parents = tuple(self._nodes[id(a)] for a in used)
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if used and isinstance(first, Tensor):
            name = func.overloadpacket.__name__.removesuffix("_")
            at = tuple(HERE if any(a is u for u in used) else a for a in args)
            kept = first.ndim > 0 and used[0].ndim > 0 and len(first) == len(used[0])
            node = Operation(name, at, kwargs or {}, parents, tuple(used[0].shape[1:]), tuple(first.shape[1:]), kept)
            self._kept.append(first)
            self._nodes[id(first)] = node
        return out

    def path(self, r: Tensor) -> list[Operation]:
        """Return the operations that lead from the input to r, in order."""
        if id(r) not in self._nodes:
            raise CertificateError(
                "What the layer is fed does not depend on the input, so there is nothing to certify."
            )
        node, found = self._nodes[id(r)], []
        while node.parents:
            if len(node.parents) > 1:
                raise CertificateError(
                    f"The part before the layer is not a chain: {node.operation!r} joins two paths from the input "
                    "(a residual connection or a product). Certify a layer before it, or use kind='local'."
                )
            found.append(node)
            node = node.parents[0]
        return found[::-1]


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    nested = (a for arg in args for a in (arg if isinstance(arg, tuple | list) else [arg]))
    return [a for a in nested if isinstance(a, Tensor)]


def read(node: Operation) -> list[Stage]:
    """Return the steps that one operation comes to."""
    reader = _READERS.get(node.operation)
    found = reader(node) if reader is not None and node.batch_kept else None
    if found is None:
        raise CertificateError(
            f"Cannot walk through {node.operation!r} ({node.in_shape} to {node.out_shape}). A certificate knows chains "
            "of linear, convolution, pooling, batch norm (eval) and activation layers; use kind='local' for others."
        )
    return found


def _reshape(node: Operation) -> list[Stage]:
    return [] if node.in_shape == node.out_shape else [Reshape(node.in_shape, node.out_shape)]


def _curve(make: Callable[..., Curve]) -> Callable[[Operation], list[Stage]]:
    return lambda node: [Activation(node.in_shape, node.out_shape, make(*node.args[1:]))]


def _constant(value: Any) -> Tensor | None:
    if isinstance(value, int | float):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.detach() if isinstance(value, Tensor) else None


def _elementwise(node: Operation) -> list[Stage] | None:
    left, right = node.args[:2]
    value = _constant(right if left is HERE else left)
    if value is None or (value.ndim > len(node.in_shape) and len(value) != 1) or node.in_shape != node.out_shape:
        return None
    value = value[0] if value.ndim > len(node.in_shape) else value
    one, zero = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    alpha = float(node.kwargs.get("alpha", 1.0))
    factor, offset = {
        ("add", True): (one, alpha * value),
        ("add", False): (alpha * one, value),
        ("sub", True): (one, -alpha * value),
        ("sub", False): (-alpha * one, value),
        ("rsub", True): (-alpha * one, value),
        ("mul", True): (value, zero),
        ("mul", False): (value, zero),
        ("div", True): (1 / value, zero),
    }.get((node.operation, left is HERE), (None, zero))
    return None if factor is None else [Scale(node.in_shape, node.out_shape, offset, factor)]


def _batch_norm(node: Operation) -> list[Stage] | None:
    weight, bias, mean, var = (_constant(a) for a in node.args[1:5])
    training, eps = (False, node.args[6]) if "no_training" in node.operation else (node.args[5], node.args[7])
    if training or mean is None or var is None:
        return None
    factor = (var + eps).rsqrt() * (1 if weight is None else weight)
    offset = (0 if bias is None else bias) - mean * factor
    over = (-1, *[1] * (len(node.in_shape) - 1))
    return [Scale(node.in_shape, node.out_shape, offset.reshape(over), factor.reshape(over))]


def _addmm(node: Operation) -> list[Stage] | None:
    bias, x, weight = node.args[:3]
    plain = all(float(node.kwargs.get(k, 1)) == 1 for k in ("alpha", "beta"))
    return [Dense(node.in_shape, node.out_shape, bias, weight.mT)] if x is HERE and plain else None


def _mm(node: Operation) -> list[Stage] | None:
    x, weight = node.args[:2]
    zero = torch.zeros((), dtype=torch.float64)
    return [Dense(node.in_shape, node.out_shape, zero, weight.mT)] if x is HERE else None


def _convolution(node: Operation) -> list[Stage] | None:
    x, weight, bias, stride, padding, dilation, turned, _, groups = node.args
    if turned or x is not HERE:
        return None
    over = (-1, *[1] * (weight.ndim - 2))
    offset = torch.zeros((), dtype=torch.float64) if bias is None else bias.reshape(over)
    settings = (tuple(stride), tuple(padding), tuple(dilation), int(groups))
    return [Conv(node.in_shape, node.out_shape, offset, weight, *settings)]


def _average(node: Operation, kernel: Shape, stride: Shape, padding: Shape) -> list[Stage]:
    channels, dims = node.in_shape[0], len(kernel)
    weight = torch.full((channels, 1, *kernel), 1 / torch.Size(kernel).numel(), dtype=torch.float64)
    zero = torch.zeros((), dtype=torch.float64)
    sizes = zip(node.in_shape[1:], kernel, stride, padding, strict=True)
    out = (channels, *((n + 2 * p - k) // s + 1 for n, k, s, p in sizes))
    conv = Conv(node.in_shape, out, zero, weight, stride, padding, (1,) * dims, channels)
    return [conv] if out == node.out_shape else [conv, Reshape(out, node.out_shape)]


def _avg_pool(node: Operation) -> list[Stage] | None:
    kernel, stride, padding, ceil, counts_padding, divisor = _filled(node, (), (0, 0), False, True, None)
    if ceil or divisor is not None or (any(padding) and not counts_padding):
        return None
    return _average(node, tuple(kernel), tuple(stride or kernel), tuple(padding))


def _filled(node: Operation, *defaults: Any) -> list[Any]:
    """Return the arguments after the input: the first as given, the others by default where absent."""
    given = list(node.args[1:])
    return given + list(defaults)[len(given) - 1 :]


def _mean(node: Operation) -> list[Stage] | None:
    over = sorted(d % (len(node.in_shape) + 1) for d in node.args[1])
    spatial = node.in_shape[1:]
    if not spatial or over != list(range(2, len(node.in_shape) + 1)):
        return None
    return _average(node, spatial, spatial, (0,) * len(spatial))


def _max_pool(node: Operation) -> list[Stage]:
    kernel, stride, padding, dilation, ceil = _filled(node, (), (0, 0), (1, 1), False)
    settings = (tuple(kernel), tuple(stride or kernel), tuple(padding), tuple(dilation), bool(ceil))
    return [MaxPool(node.in_shape, node.out_shape, *settings)]


def _adaptive(node: Operation) -> list[Stage] | None:
    pairs = list(zip(node.in_shape[1:], node.out_shape[1:], strict=True))
    if any(n % o for n, o in pairs):
        return None
    kernel = tuple(n // o for n, o in pairs)
    return _average(node, kernel, kernel, (0,) * len(kernel))


def _gelu(node: Operation) -> list[Stage] | None:
    exact = node.kwargs.get("approximate", "none") == "none"
    return [Activation(node.in_shape, node.out_shape, activations.GELU)] if exact else None


def _leaky(slope: float = 0.01) -> Curve:
    return activations.leaky(slope, "leaky_relu")


_SAME = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "detach", "alias", "clone", "_reshape_alias")
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit_no_training")

_READERS: dict[str, Callable[[Operation], list[Stage] | None]] = {
    **dict.fromkeys(_SAME, _reshape),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div"), _elementwise),
    **dict.fromkeys(_NORMS, _batch_norm),
    "addmm": _addmm,
    "mm": _mm,
    "convolution": _convolution,
    "max_pool2d_with_indices": _max_pool,
    "avg_pool2d": _avg_pool,
    "_adaptive_avg_pool2d": _adaptive,
    "mean": _mean,
    "relu": _curve(activations.leaky),
    "leaky_relu": _curve(_leaky),
    "hardtanh": _curve(activations.hardtanh),
    "softplus": _curve(activations.softplus),
    "elu": _curve(activations.elu),
    "sigmoid": _curve(lambda: activations.SIGMOID),
    "tanh": _curve(lambda: activations.TANH),
    "silu": _curve(lambda: activations.SILU),
    "gelu": _gelu,
}
