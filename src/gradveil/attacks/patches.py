"""Weight gradients of a convolution per problem, as products with its patches: the form for CUDA.

A patch is a row (kernel, channels) with the channels side by side, so that it is copied in long runs, and the way back
to the input is another such product or a grouped convolution, not a scatter.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride and padding of a convolution."""

    kernel: Pair
    stride: Pair
    padding: Pair

    @classmethod
    def of(cls, layer: nn.Conv2d) -> "Geometry":
        """Read it off a layer."""
        return cls(pair(layer.kernel_size), pair(layer.stride), pair(layer.padding))


def pair(value: Any) -> Pair:
    """Return a setting of two numbers."""
    first, second = value
    return int(first), int(second)


LARGE = 2**17  # entries of an image from which a grouped convolution beats another copy into patches


def weight_gradient_by_patches(h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
    """Return the kernel's gradient per problem (P, O, C, *kernel) from h (P, N, C, H, W), delta (P, N, O, ...).

    It can be differentiated once.
    """
    out: Tensor = _ByPatches.apply(h, delta, g)
    return out


def patches(h: Tensor, g: Geometry) -> Tensor:
    """Return the patches of h (P, N, C, H, W) as rows (P, N * positions, kernel * C)."""
    (kh, kw), (sh, sw), (ph, pw) = g.kernel, g.stride, g.padding
    image = F.pad(h.permute(0, 1, 3, 4, 2), (0, 0, pw, pw, ph, ph)).contiguous()  # (P, N, H, W, C)
    problems, images, height, width, channels = image.shape
    shape = (problems * images, (height - kh) // sh + 1, (width - kw) // sw + 1, kh, kw * channels)
    row = width * channels
    view = image.as_strided(shape, (height * row, sh * row, sw * channels, row, 1))
    return view.reshape(problems, images * shape[1] * shape[2], -1)


class _ByPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
        rows = patches(h, g)
        ctx.save_for_backward(rows, delta)
        ctx.size, ctx.g = pair(h.shape[3:]), g
        kernel = torch.bmm(delta.transpose(1, 2).flatten(2), rows)  # (P, O, kernel * C)
        return kernel.view(*kernel.shape[:2], *g.kernel, -1).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, delta = ctx.saved_tensors
        by_delta = torch.bmm(rows, bar.permute(0, 3, 4, 2, 1).flatten(1, 3))  # (P, N * positions, O)
        images, positions = delta.shape[1], delta.shape[3:]
        by_delta = by_delta.unflatten(1, (images, *positions)).permute(0, 1, 4, 2, 3)
        return _by_input(delta, bar, ctx.size, ctx.g), by_delta, None


def _by_input(delta: Tensor, bar: Tensor, size: Pair, g: Geometry) -> Tensor:
    """Return the gradient by h (P, N, C, *size): delta spread by each problem's own kernel bar (P, O, C, *kernel)."""
    found: Tensor
    problems, images = delta.shape[:2]
    side = delta.transpose(0, 1).flatten(1, 2)  # (N, P O, ...)
    flipped = bar.flip(3, 4)
    back = Geometry(g.kernel, (1, 1), pair([k - 1 - p for k, p in zip(g.kernel, g.padding, strict=True)]))
    if g.stride == (1, 1) and delta[0, 0].numel() < LARGE:
        found = torch.bmm(patches(delta, back), flipped.permute(0, 3, 4, 1, 2).flatten(1, 3))
        return found.view(problems, images, *size, -1).permute(0, 1, 4, 2, 3)
    if g.stride == (1, 1):
        found = F.conv2d(side, flipped.transpose(1, 2).flatten(0, 1), None, 1, back.padding, 1, problems)
    else:
        found = transposed(side, bar.flatten(0, 1), size, g, problems)
    return found.view(images, problems, -1, *size).transpose(0, 1)


def transposed(delta: Tensor, weight: Tensor, size: Pair, g: Geometry, groups: int) -> Tensor:
    """Return the transposed convolution; weight (groups * O, C, *kernel), delta (B, groups * O, ...)."""
    outside = [
        full + 2 * p - (o - 1) * s - k
        for full, p, o, s, k in zip(size, g.padding, delta.shape[2:], g.stride, g.kernel, strict=True)
    ]
    return F.conv_transpose2d(delta, weight, None, g.stride, g.padding, outside, groups)
