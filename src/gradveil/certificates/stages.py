"""The affine steps a network is made of, as maps on one example: x -> A x + offset, with |A| and the transposes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod

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
