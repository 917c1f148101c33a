"""Activations: their slopes at a point, and as curves with the range of values and of slopes over an interval."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.representation.rules.arithmetic import Scale, scaled
from gradveil.representation.rules.base import Call, Edges, Step, Walked, plain, rule, wide

aten = torch.ops.aten
Map = Callable[[Tensor], Tensor]
Interval = tuple[Tensor, Tensor]  # lower and upper ends, of one shape
SLOPE_ROUNDING = 2e-15  # of a derivative computed in float64: where it is nearly 0, terms of size 1 cancel


@dataclass(frozen=True)
class Curve:
    """A scalar function with its derivative, and where each of them turns.

    Between two points a function takes its extremes at the ends or where it turns, so the exact range of
    values and of slopes follows. At a kink the derivative counts from both sides.
    """

    name: str
    function: Map
    slope_left: Map  # the derivative, from the left at a kink
    slope_right: Map  # the derivative, from the right at a kink
    turns: tuple[float, ...] = ()  # where the function changes direction
    slope_turns: tuple[float, ...] = ()  # where the derivative does, jumps aside
    shape: str = "general"  # "convex", "s-shaped" (convex below 0, concave above) or "general"
    smooth: bool = False  # whether the derivative is continuous
    unit: float | None = None  # size of the numbers a computed value is a sum of, beside it and x; None: no rounding
    off: float = 0.0  # how far a model's own values may lie from the curve

    def values(self, lower: Tensor, upper: Tensor) -> Interval:
        """Return the least and the largest value between ``lower`` and ``upper``."""
        return _range(lower, upper, self.function, self.turns)

    def slopes(self, lower: Tensor, upper: Tensor) -> Interval:
        """Return the least and the largest slope between ``lower`` and ``upper``."""
        left, right = (_range(lower, upper, f, self.slope_turns) for f in (self.slope_left, self.slope_right))
        low, high = torch.minimum(left[0], right[0]), torch.maximum(left[1], right[1])
        if not self.unit:
            return low, high  # pieces of lines: exact
        return low - SLOPE_ROUNDING * (1 + low.abs()), high + SLOPE_ROUNDING * (1 + high.abs())

    def steepest(self) -> float:
        """Return the largest absolute slope anywhere: the Lipschitz constant in every p-norm."""
        far = torch.tensor([1e6], dtype=torch.float64)
        low, high = self.slopes(-far, far)
        return float(torch.maximum(low.abs(), high.abs()))


def _range(lower: Tensor, upper: Tensor, f: Map, turns: tuple[float, ...]) -> Interval:
    ends = f(lower), f(upper)
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    for turn in turns:
        inside = (lower < turn) & (turn < upper)
        value = f(torch.full_like(lower, turn))
        low = torch.where(inside, torch.minimum(low, value), low)
        high = torch.where(inside, torch.maximum(high, value), high)
    return low, high


@dataclass(frozen=True)
class Pointwise(Step):
    """A curve applied to every entry."""

    curve: Curve

    def __call__(self, x: Tensor) -> Tensor:
        return self.curve.function(x)


def activation(
    name: str,
    slopes: Callable[..., Tensor],
    curve: Callable[..., Curve | None] | None = None,
    **settings: Any,
) -> None:
    """Make an activation known: slopes(call, *settings) and curve(*settings), the settings with their defaults."""

    def given(call: Call) -> list[Any]:
        return [call.arg(place, key, value) for place, (key, value) in enumerate(settings.items(), start=1)]

    def step(call: Call, edges: Edges) -> Pointwise | None:
        made = curve(*given(call)) if curve else None
        return None if made is None else Pointwise(*call.shapes, made)

    @rule(name, step=step if curve else None)
    def edges(call: Call) -> Edges | None:
        return scaled(call.x, slopes(call, *given(call)), call.out)


def _backward(function: Any, *more: Any) -> Callable[..., Tensor]:

    def slopes(call: Call, *settings: Any) -> Tensor:
        x = wide(call.x)
        return function(torch.ones_like(x), x, *settings, *more)  # type: ignore[no-any-return]

    return slopes


def _elu_slopes(call: Call, alpha: float, scale: float = 1, input_scale: float = 1) -> Tensor:
    x = wide(call.x)
    return aten.elu_backward(torch.ones_like(x), alpha, scale, input_scale, False, x)  # type: ignore[no-any-return]


def _gelu_slopes(call: Call, kind: str) -> Tensor:
    x = wide(call.x)
    return aten.gelu_backward(torch.ones_like(x), x, approximate=kind)  # type: ignore[no-any-return]


def sigmoid_slopes(y: Tensor) -> Tensor:
    """Return y (1 - y)."""
    y = wide(y)
    return torch.addcmul(y, y, y, value=-1)


def tanh_slopes(y: Tensor) -> Tensor:
    """Return 1 - y²."""
    return 1 - wide(y).square()


def relu_slopes(y: Tensor) -> Tensor:
    """Return 1 where the unit is on, else 0: the sign of an output that is never negative."""
    return wide(y).sign()


# Activations whose slopes follow from their output: the plain ones, walked without a recorder.
BY_OUTPUT: dict[type[nn.Module], tuple[Map, Map]] = {
    nn.Sigmoid: (torch.sigmoid, sigmoid_slopes),
    nn.Tanh: (torch.tanh, tanh_slopes),
    nn.ReLU: (torch.relu, relu_slopes),
}


@plain(*BY_OUTPUT)
def _walked(layer: nn.Module, x: Tensor) -> Walked:
    function, slopes = BY_OUTPUT[type(layer)]
    out = function(x)
    return out, Scale(slopes(out), tuple(x.shape), tuple(x.shape))


def _smooth(name: str, f: Map, df: Map, turns: tuple[float, ...], slope_turns: tuple[float, ...], shape: str) -> Curve:
    return Curve(name, f, df, df, turns, slope_turns, shape, smooth=True, unit=1.0)


def _step(x: Tensor, at: float, above: float, below: float, right: bool) -> Tensor:
    up = x >= at if right else x > at
    return torch.where(up, torch.full_like(x, above), torch.full_like(x, below))


def _leaky(slope: float, name: str = "leaky_relu") -> Curve:
    """Return x above 0 and slope x below: the ReLU is slope 0."""
    return Curve(
        name,
        lambda x: torch.where(x > 0, x, slope * x),
        lambda x: _step(x, 0.0, 1.0, slope, right=False),
        lambda x: _step(x, 0.0, 1.0, slope, right=True),
        shape="convex" if slope <= 1 else "general",
        turns=(0.0,) if slope < 0 else (),
        unit=0.0 if slope else None,
    )


def _hardtanh(low: float, high: float) -> Curve:
    """Return x cut to [low, high]: ReLU6 is [0, 6]."""

    def slope(x: Tensor) -> Tensor:
        return ((x >= low) & (x <= high)).to(x.dtype)

    # A point strictly inside stands for the middle part, so that an interval around all of it sees slope 1.
    # The ends of the range are rounded with the model: a rounding of that size.
    middle = (low + high) / 2
    return Curve("hardtanh", lambda x: x.clamp(low, high), slope, slope, slope_turns=(middle,), unit=0.0)


def _softplus(beta: float, threshold: float) -> Curve | None:
    """Return log(1 + exp(beta x)) / beta. Above the threshold torch returns x itself: off by the jump there."""
    if beta <= 0:
        return None
    return Curve(
        "softplus",
        lambda x: torch.logaddexp(torch.zeros_like(x), beta * x) / beta,
        lambda x: torch.sigmoid(beta * x),
        lambda x: torch.sigmoid(beta * x),
        shape="convex",
        smooth=True,
        unit=1 / beta,
        off=float(F.softplus(torch.tensor(-threshold, dtype=torch.float64), threshold=1e3)) / beta,
    )


def _elu(alpha: float, scale: float = 1.0, input_scale: float = 1.0) -> Curve | None:
    """Return scale x above 0 and scale alpha (exp(input_scale x) - 1) below: ELU, CELU and SELU."""
    if scale <= 0 or input_scale <= 0:
        return None
    steep = scale * alpha * input_scale  # the slope just below 0

    def below(x: Tensor) -> Tensor:
        return steep * torch.exp(input_scale * x.clamp(max=0))

    return Curve(
        "elu",
        lambda x: torch.where(x > 0, scale * x, scale * alpha * torch.expm1(input_scale * x.clamp(max=0))),
        lambda x: torch.where(x > 0, torch.full_like(x, scale), below(x)),
        lambda x: torch.where(x >= 0, torch.full_like(x, scale), below(x)),
        turns=(0.0,) if alpha < 0 else (),
        slope_turns=(0.0,),
        shape="convex" if 0 <= steep <= scale else "general",
        smooth=steep == scale,
        unit=scale * max(abs(alpha), 1.0),
    )


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / sqrt(2))) + x * torch.exp(-x * x / 2) / sqrt(2 * torch.pi)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


SIGMOID = _smooth("sigmoid", torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x), (), (0.0,), "s-shaped")
TANH = _smooth("tanh", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, (), (0.0,), "s-shaped")
GELU = _smooth("gelu", F.gelu, _gelu_slope, (-0.7517915246935644,), (-sqrt(2), sqrt(2)), "general")
SILU = _smooth(
    "silu", F.silu, _silu_slope, (-1.2784645427610737,), (-2.3993572805154675, 2.3993572805154675), "general"
)

activation("sigmoid", lambda call: sigmoid_slopes(call.out), lambda: SIGMOID)
activation("tanh", lambda call: tanh_slopes(call.out), lambda: TANH)
activation("relu", lambda call: relu_slopes(call.out), lambda: _leaky(0.0, "relu"))
activation("leaky_relu", _backward(aten.leaky_relu_backward, False), _leaky, negative_slope=0.01)
activation("hardtanh", _backward(aten.hardtanh_backward), _hardtanh, min_val=-1, max_val=1)
activation("softplus", _backward(aten.softplus_backward), _softplus, beta=1, threshold=20)
activation("silu", _backward(aten.silu_backward), lambda: SILU)
activation("gelu", _gelu_slopes, lambda kind: GELU if kind == "none" else None, approximate="none")
activation("elu", _elu_slopes, _elu, alpha=1, scale=1, input_scale=1)
activation(
    "celu",
    lambda call, alpha: _elu_slopes(call, alpha, 1, 1 / alpha),
    lambda alpha: _elu(alpha, 1.0, 1 / alpha),
    alpha=1.0,
)
SELU = (1.6732632423543772, 1.0507009873554805)  # Klambauer et al. 2017
activation("selu", lambda call: _elu_slopes(call, *SELU), lambda: _elu(*SELU))
activation("mish", _backward(aten.mish_backward))
activation("hardswish", _backward(aten.hardswish_backward))
activation("hardsigmoid", _backward(aten.hardsigmoid_backward))
