"""The affine steps a network is made of, as maps on one example: x -> A x + offset, with |A| and the transposes."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as nn_grad

Shape = tuple[int, ...]
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_INPUT = {1: nn_grad.conv1d_input, 2: nn_grad.conv2d_input, 3: nn_grad.conv3d_input}


@dataclass(frozen=True)
class Stage(ABC):
    """One step of a chain; shapes are those of one example, every tensor has a batch in front."""

    in_shape: Shape
    out_shape: Shape

    @property
    def in_size(self) -> int:
        """How many numbers go in."""
        return prod(self.in_shape)

    @property
    def out_size(self) -> int:
        """How many numbers come out."""
        return prod(self.out_shape)

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Apply the step to x (N, *in_shape)."""


@dataclass(frozen=True)
class Reshape(Stage):
    """The same numbers in another shape: norm 1, whatever the norm."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x (N, *out_shape)."""
        return x.reshape(len(x), *self.out_shape)


@dataclass(frozen=True)
class Affine(Stage):
    """x -> A x + offset."""

    offset: Tensor  # broadcasts to out_shape

    @abstractmethod
    def linear(self, x: Tensor, absolute: bool = False) -> Tensor:
        """Return A x, or |A| x with the absolute value of every entry of A."""

    @abstractmethod
    def transposed(self, y: Tensor, absolute: bool = False) -> Tensor:
        """Return Aᵀ y, or |A|ᵀ y."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return A x + offset."""
        return self.linear(x) + self.offset


@dataclass(frozen=True)
class Scale(Affine):
    """A diagonal map: normalisation, batch norm in eval mode, a shift, a factor."""

    factor: Tensor  # broadcasts to in_shape

    def linear(self, x: Tensor, absolute: bool = False) -> Tensor:
        """Return the scaled x."""
        return x * (self.factor.abs() if absolute else self.factor)

    def transposed(self, y: Tensor, absolute: bool = False) -> Tensor:
        """Return the same as ``linear``: a diagonal map is symmetric."""
        return self.linear(y, absolute)


@dataclass(frozen=True)
class Dense(Affine):
    """A matrix on the last dimension."""

    weight: Tensor  # (out, in)

    def linear(self, x: Tensor, absolute: bool = False) -> Tensor:
        """Return x Wᵀ."""
        return x @ (self.weight.abs() if absolute else self.weight).mT

    def transposed(self, y: Tensor, absolute: bool = False) -> Tensor:
        """Return y W."""
        return y @ (self.weight.abs() if absolute else self.weight)


@dataclass(frozen=True)
class Conv(Affine):
    """A zero-padded convolution on one, two or three spatial dimensions; average pooling is one too."""

    weight: Tensor  # (out, in / groups, *kernel)
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int

    def linear(self, x: Tensor, absolute: bool = False) -> Tensor:
        """Return the convolution without its bias."""
        w = self.weight.abs() if absolute else self.weight
        return _CONV[w.ndim - 2](x, w, None, self.stride, self.padding, self.dilation, self.groups)

    def transposed(self, y: Tensor, absolute: bool = False) -> Tensor:
        """Return the gradient of the convolution with respect to its input."""
        w = self.weight.abs() if absolute else self.weight
        size = (len(y), *self.in_shape)
        found: Tensor = _CONV_INPUT[w.ndim - 2](size, w, y, self.stride, self.padding, self.dilation, self.groups)
        return found


@dataclass(frozen=True)
class MaxPool(Stage):
    """The largest of each window of a 2-d map."""

    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    ceil: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Return the pooled maps."""
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, self.dilation, self.ceil)

    def windows(self, x: Tensor) -> Tensor:
        """Return the entries of every window (N, C, size of a window, windows); outside the map is -inf."""
        n, c = x.shape[:2]
        bottom, right = self._reach()
        top, left = self.padding
        padded = F.pad(x.reshape(n * c, 1, *x.shape[2:]), (left, right, top, bottom), value=-torch.inf)
        found = F.unfold(padded, self.kernel, self.dilation, 0, self.stride)
        return found.reshape(n, c, *found.shape[1:])

    def gather(self, windows: Tensor) -> Tensor:
        """Return the transpose of ``windows``: each pixel's sum over the windows that hold it (N, C, H, W)."""
        n, c = windows.shape[:2]
        bottom, right = self._reach()
        top, left = self.padding
        h, w = self.in_shape[1:]
        size = (h + top + bottom, w + left + right)
        summed = F.fold(windows.flatten(0, 1), size, self.kernel, self.dilation, 0, self.stride)
        return summed[:, 0, top : top + h, left : left + w].reshape(n, c, h, w)

    def _reach(self) -> tuple[int, int]:
        """How far beyond the map's bottom and right the last window reaches."""

        def beyond(i: int) -> int:
            last = (self.out_shape[i + 1] - 1) * self.stride[i] + self.dilation[i] * (self.kernel[i] - 1)
            return max(0, last + 1 - self.in_shape[i + 1] - self.padding[i])

        return beyond(0), beyond(1)

    def overlap(self) -> int:
        """Return in how many windows a pixel can lie: 1 where windows do not overlap."""
        ones = torch.ones(1, 1, prod(self.kernel), prod(self.out_shape[1:]))
        return int(self.gather(ones).max())


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
