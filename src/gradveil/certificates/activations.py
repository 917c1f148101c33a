"""Activation functions as a certificate needs them: what values and slopes they take between two points."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.certificates.stages import Stage

Map = Callable[[Tensor], Tensor]
Interval = tuple[Tensor, Tensor]  # lower and upper ends, of one shape


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

    def values(self, lower: Tensor, upper: Tensor) -> Interval:
        """Return the least and the largest value between ``lower`` and ``upper``."""
        return _range(lower, upper, self.function(lower), self.function(upper), self.function, self.turns)

    def slopes(self, lower: Tensor, upper: Tensor) -> Interval:
        """Return the least and the largest slope between ``lower`` and ``upper``."""
        left = _range(lower, upper, self.slope_left(lower), self.slope_left(upper), self.slope_left, self.slope_turns)
        right = _range(
            lower, upper, self.slope_right(lower), self.slope_right(upper), self.slope_right, self.slope_turns
        )
        return torch.minimum(left[0], right[0]), torch.maximum(left[1], right[1])

    def steepest(self) -> float:
        """Return the largest absolute slope anywhere: the Lipschitz constant in every p-norm."""
        far = torch.tensor([1e6], dtype=torch.float64)
        low, high = self.slopes(-far, far)
        return float(torch.maximum(low.abs(), high.abs()))


def _range(
    lower: Tensor, upper: Tensor, at_lower: Tensor, at_upper: Tensor, f: Map, turns: tuple[float, ...]
) -> Interval:
    low, high = torch.minimum(at_lower, at_upper), torch.maximum(at_lower, at_upper)
    for turn in turns:
        inside = (lower < turn) & (turn < upper)
        value = f(torch.full_like(lower, turn))
        low = torch.where(inside, torch.minimum(low, value), low)
        high = torch.where(inside, torch.maximum(high, value), high)
    return low, high


@dataclass(frozen=True)
class Activation(Stage):
    """A curve applied to every entry."""

    curve: Curve

    def __call__(self, x: Tensor) -> Tensor:
        """Return the curve's values."""
        return self.curve.function(x)


def _step(x: Tensor, at: float, above: float, below: float, right: bool) -> Tensor:
    up = x >= at if right else x > at
    return torch.where(up, torch.full_like(x, above), torch.full_like(x, below))


def leaky(slope: float = 0.0, name: str = "relu") -> Curve:
    """Return x above 0 and slope x below: the ReLU is slope 0."""
    return Curve(
        name,
        lambda x: torch.where(x > 0, x, slope * x),
        lambda x: _step(x, 0.0, 1.0, slope, right=False),
        lambda x: _step(x, 0.0, 1.0, slope, right=True),
        shape="convex" if slope <= 1 else "general",
        turns=(0.0,) if slope < 0 else (),
    )


def hardtanh(low: float, high: float) -> Curve:
    """Return x cut to [low, high]: ReLU6 is [0, 6]."""

    def slope(x: Tensor) -> Tensor:
        return ((x >= low) & (x <= high)).to(x.dtype)

    # A point strictly inside stands for the middle part, so that an interval around all of it sees slope 1.
    return Curve("hardtanh", lambda x: x.clamp(low, high), slope, slope, slope_turns=((low + high) / 2,))


def _smooth(name: str, f: Map, df: Map, turns: tuple[float, ...], slope_turns: tuple[float, ...], shape: str) -> Curve:
    return Curve(name, f, df, df, turns, slope_turns, shape)


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / sqrt(2))) + x * torch.exp(-x * x / 2) / sqrt(2 * torch.pi)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def softplus(beta: float = 1.0, threshold: float = 20.0) -> Curve:
    """Return log(1 + exp(beta x)) / beta."""
    return _smooth(
        "softplus", lambda x: F.softplus(x, beta, threshold), lambda x: torch.sigmoid(beta * x), (), (), "convex"
    )


def elu(alpha: float = 1.0) -> Curve:
    """Return x above 0 and alpha (exp(x) - 1) below."""
    return Curve(
        "elu",
        lambda x: F.elu(x, alpha),
        lambda x: torch.where(x > 0, torch.ones_like(x), alpha * torch.exp(x.clamp(max=0))),
        lambda x: torch.where(x >= 0, torch.ones_like(x), alpha * torch.exp(x.clamp(max=0))),
        slope_turns=(0.0,),
        shape="convex" if alpha <= 1 else "general",
    )


SIGMOID = _smooth("sigmoid", torch.sigmoid, lambda x: torch.sigmoid(x) * torch.sigmoid(-x), (), (0.0,), "s-shaped")
TANH = _smooth("tanh", torch.tanh, lambda x: 1 - torch.tanh(x) ** 2, (), (0.0,), "s-shaped")
GELU = _smooth("gelu", F.gelu, _gelu_slope, (-0.7517915246935644,), (-sqrt(2), sqrt(2)), "general")
SILU = _smooth(
    "silu", F.silu, _silu_slope, (-1.2784645427610737,), (-2.3993572805154675, 2.3993572805154675), "general"
)
