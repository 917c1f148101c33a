"""The three convolutions of a double backward pass: forward, pulled back, and weight gradients per problem.

A batch is (P, N, C, H, W): P problems of N images. The kernel is shared by all problems; its gradient is not.
On a CPU each is an autograd function with its own backward pass (first derivatives only), where a strided
transposed convolution runs as a convolution at the lower resolution that yields all phases of the output at
once, and weight gradients are one copy into columns and one batched product. Elsewhere the first two are torch's
own, and weight gradients are products with patches that hold their channels side by side (``patches.py``).
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradveil.attacks.patches import Geometry, Pair, pair, transposed, weight_gradient_by_patches


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
