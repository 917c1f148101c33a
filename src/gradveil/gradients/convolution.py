"""Weight gradients of a convolution per problem, as products with its patches: the form for CUDA.

A patch is a row (kernel, channels) with the channels side by side, so that it is copied in long runs, and the way back
to the input is another such product or a grouped convolution, not a scatter.
"""

from dataclasses import dataclass
from functools import cache
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
    if g.stride != (1, 1):  # a transposed convolution of P groups would be P convolutions, one after the other
        columns = torch.bmm(bar.flatten(2).mT, _rows(delta)).unflatten(2, (images, -1)).transpose(1, 2)
        found = F.fold(columns.flatten(0, 1), size, g.kernel, padding=g.padding, stride=g.stride)
        return found.view(problems, images, -1, *size)
    flipped = bar.flip(3, 4)
    back = Geometry(g.kernel, (1, 1), pair([k - 1 - p for k, p in zip(g.kernel, g.padding, strict=True)]))
    if delta[0, 0].numel() < LARGE:
        found = torch.bmm(patches(delta, back), flipped.permute(0, 3, 4, 1, 2).flatten(1, 3))
        return found.view(problems, images, *size, -1).permute(0, 1, 4, 2, 3)
    side = delta.transpose(0, 1).flatten(1, 2)  # (N, P O, ...)
    found = F.conv2d(side, flipped.transpose(1, 2).flatten(0, 1), None, 1, back.padding, 1, problems)
    return found.view(images, problems, -1, *size).transpose(0, 1)


def transposed(delta: Tensor, weight: Tensor, size: Pair, g: Geometry, groups: int) -> Tensor:
    """Return the transposed convolution; weight (groups * O, C, *kernel), delta (B, groups * O, ...)."""
    outside = [
        full + 2 * p - (o - 1) * s - k
        for full, p, o, s, k in zip(size, g.padding, delta.shape[2:], g.stride, g.kernel, strict=True)
    ]
    return F.conv_transpose2d(delta, weight, None, g.stride, g.padding, outside, groups)


def convolve(h: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
    """Return the convolution of h (B, C, H, W) with a fixed kernel (O, C, *kernel)."""
    if h.is_cuda:
        return F.conv2d(h, weight, bias, g.stride, g.padding)
    out: Tensor = _Convolve.apply(h, weight, bias, g)
    return out


def pull_back(delta: Tensor, weight: Tensor, size: Pair, g: Geometry) -> Tensor:
    """Return the gradient by the input (B, C, *size) from the one by the output (B, O, ...)."""
    if delta.is_cuda:
        return transposed(delta, weight, size, g, 1)
    out: Tensor = _PullBack.apply(delta, weight, size, g)
    return out


def weight_gradient(h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
    """Return the kernel's gradient per problem (P, O, C, *kernel) from h (P, N, C, H, W), delta (P, N, O, ...)."""
    if h.is_cuda:
        return weight_gradient_by_patches(h, delta, g)
    out: Tensor = _WeightGradient.apply(h, delta, g)
    return out


def _transposed_by_phases(delta: Tensor, weight: Tensor, size: Pair, g: Geometry, groups: int) -> Tensor:
    """Return the same as ``transposed``; output pixels of one phase (row % s, column % s) see every s-th tap."""
    s = g.stride[0]
    if s == 1 or g.stride[1] != s:
        return transposed(delta, weight, size, g, groups)
    kh, kw = (-(-k // s) for k in g.kernel)  # taps per phase
    taps = F.pad(weight.flatten(2), (0, 1)).index_select(2, _taps(g.kernel, s).to(weight.device))
    kernel = taps.unflatten(2, (s * s, kh, kw)).flatten(1, 2)  # (groups O, C s s, kh, kw)
    if groups == 1:
        phases = F.conv2d(delta, kernel.transpose(0, 1).flip(2, 3), None, 1, (kh - 1, kw - 1))
    else:
        phases = F.conv_transpose2d(delta, kernel, None, 1, 0, 0, groups)
    return _interleave(phases.unflatten(1, (-1, s * s)), size, g.padding, s)


@cache
def _taps(kernel: Pair, s: int) -> Tensor:
    """Return for each phase the flat positions of its taps in the kernel; one past the end stands for zero."""
    kh, kw = (-(-k // s) for k in kernel)
    row = (torch.arange(s)[:, None] + s * torch.arange(kh)).view(s, 1, kh, 1)
    column = (torch.arange(s)[:, None] + s * torch.arange(kw)).view(1, s, 1, kw)
    inside = (row < kernel[0]) & (column < kernel[1])
    return torch.where(inside, row * kernel[1] + column, kernel[0] * kernel[1]).flatten()


def _interleave(phases: Tensor, size: Pair, padding: Pair, s: int) -> Tensor:
    """Return the image (B, C, *size) whose pixel at y - padding is pixel y // s of phase y % s (B, C, s s, h, w)."""
    out = phases.new_zeros(*phases.shape[:2], *size)
    for phase in range(s * s):
        (to_y, from_y), (to_x, from_x) = (_every(s, p, pad) for p, pad in zip(divmod(phase, s), padding, strict=True))
        part = phases[:, :, phase, from_y:, from_x:]
        target = out[:, :, to_y::s, to_x::s]
        h, w = min(part.shape[2], target.shape[2]), min(part.shape[3], target.shape[3])
        target[:, :, :h, :w] = part[:, :, :h, :w]
    return out


def _every(s: int, phase: int, pad: int) -> Pair:
    """Return where a phase starts in the cropped image, and which of its own pixels comes there."""
    start = (phase - pad) % s
    return start, (start + pad - phase) // s


def _columns(h: Tensor, g: Geometry) -> Tensor:
    """Return the patches of h (P, N, C, H, W) as columns (P, C * kernel, N * positions)."""
    padded = F.pad(h, (g.padding[1], g.padding[1], g.padding[0], g.padding[0]))
    patches = padded.unfold(3, g.kernel[0], g.stride[0]).unfold(4, g.kernel[1], g.stride[1])  # (P, N, C, h, w, k, k)
    columns: Tensor = patches.permute(0, 2, 5, 6, 1, 3, 4).flatten(1, 3).flatten(2)
    return columns


def _rows(delta: Tensor) -> Tensor:
    """Return delta (P, N, O, ...) as (P, O, N * positions)."""
    return delta.transpose(1, 2).flatten(2)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, g: Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.g = pair(h.shape[2:]), g
        return F.conv2d(h, weight, bias, g.stride, g.padding)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return _transposed_by_phases(bar, weight, ctx.size, ctx.g, 1), None, None, None


class _PullBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, weight: Tensor, size: Pair, g: Geometry) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.g = g
        return _transposed_by_phases(delta, weight, size, g, 1)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        return F.conv2d(bar, weight, None, ctx.g.stride, ctx.g.padding), None, None, None


class _WeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
        columns = _columns(h, g)
        ctx.save_for_backward(columns, delta)
        ctx.size, ctx.g = pair(h.shape[3:]), g
        return torch.bmm(_rows(delta), columns.mT).view(len(h), -1, h.shape[2], *g.kernel)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor, Tensor, None]:
        columns, delta = ctx.saved_tensors
        problems, images, outputs = delta.shape[:3]
        by_delta = torch.bmm(bar.flatten(2), columns).view(problems, outputs, images, *delta.shape[3:]).transpose(1, 2)
        side = delta.transpose(0, 1).flatten(1, 2)  # (N, P O, ...)
        by_h = _transposed_by_phases(side, bar.flatten(0, 1), ctx.size, ctx.g, problems)
        return by_h.view(images, problems, -1, *ctx.size).transpose(0, 1), by_delta, None
