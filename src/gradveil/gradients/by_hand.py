"""Trial gradients of a chain with the first backward pass written out, so that one autograd pass is left.

With δ the loss's gradient at a layer's output b = W r: ∇W = δ rᵀ per problem, and Wᵀ δ goes on to the layer
before (for a convolution, the same on patches). Every step can be differentiated once more. A patch is a row (kernel,
channels) with the channels side by side, so that it is copied in long runs, and the way back to the input is another
such product or a grouped convolution, not a scatter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp

from gradveil.models.parts import Normalize
from gradveil.modules import Link, sequential
from gradveil.tree import Params, named

Pair = tuple[int, int]


@dataclass(frozen=True)
class Geometry:
    """Kernel size, stride and padding of a convolution."""

    kernel: Pair
    stride: Pair
    padding: Pair

    @classmethod
    def of(cls, layer: nn.Conv2d) -> "Geometry":
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


WIDE = 32  # channels from which, on a CPU, torch's own convolutions win over copies into columns
# Free of parameters, and one example's output depends on that example alone.
_ACTIVATIONS = (
    nn.Sigmoid, nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Hardtanh, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)


def known_chain(model: nn.Module) -> list[Link] | None:
    """Return the layers in the order they run, or None where the model is no chain of known layers.

    Known are plain convolutions, linear layers, batch norm in eval mode, activations, poolings and flatten. Tied
    weights make it none.
    """
    links = sequential(model)
    if links is None or not all(_known(link.module) for link in links):
        return None
    seen = [id(link.module) for link in links if link.has_parameters]
    held = sum(len(list(link.module.parameters())) for link in links)
    return None if len(seen) != len(set(seen)) or len(list(model.parameters())) != held else links


def _known(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return type(module) is nn.Conv2d and plain and module.groups == 1 and tuple(module.dilation) == (1, 1)
    if isinstance(module, nn.Linear):
        return type(module) is nn.Linear
    if isinstance(module, nn.BatchNorm2d):
        return not module.training and module.running_mean is not None
    if isinstance(module, nn.Flatten):
        return module.start_dim == 1 and module.end_dim == -1
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        return False
    return isinstance(module, (*_ACTIVATIONS, *_POOLS, *_DROPOUTS, Normalize))


T = TypeVar("T")  # what goes through the layers: a tensor, or one with its tangents


@dataclass(frozen=True)
class Passed(Generic[T]):
    """A layer that was run on the examples of all problems: its output, and two ways to use δ."""

    output: T
    back: Callable[[T], T]  # δ, the loss's gradient at the output -> the one at the input
    read: Callable[[T, int], dict[str, T]]  # δ at the output, number of problems -> the layer's gradients


def pull(
    links: Sequence[Link], passed: Sequence[Passed[T]], delta: T, names: Sequence[str], problems: int
) -> dict[str, T]:
    """Return the gradients of the named parameters for δ at the logits; no layer before theirs is passed."""
    owners = {name.rpartition(".")[0] for name in names}
    first = min(i for i, link in enumerate(links) if link.path in owners)
    gradients: dict[str, T] = {}
    for i in range(len(links) - 1, first - 1, -1):
        if links[i].path in owners:
            gradients |= passed[i].read(delta, problems)
        if i > first:
            delta = passed[i].back(delta)
    return {name: gradients[name] for name in names}


def pays(links: Sequence[Link], device: torch.device) -> bool:
    """Whether the written-out form is the faster one here: on a GPU, and for narrow networks on a CPU."""
    return device.type == "cuda" or not wide(link.module for link in links)


def wide(modules: Iterable[nn.Module]) -> bool:
    """Whether there are convolutions so wide that what they compute takes longer than copies and launches."""
    return any(m.out_channels >= WIDE for m in modules if isinstance(m, nn.Conv2d))


def manual_gradients(links: Sequence[Link], wanted: Sequence[str]) -> Callable[[Tensor, Tensor], Params]:
    """Return (x, y) -> gradient by the wanted parameters, per problem; x (P, N, *shape), y (P, N, K)."""

    def gradients(x: Tensor, y: Tensor) -> Params:
        problems, images = x.shape[:2]
        h = x.flatten(0, 1)  # (P N, ...)
        steps = []
        for link in links:
            steps.append(run(link, h))
            h = steps[-1].output
        return pull(links, steps, (h.softmax(-1) - y.flatten(0, 1)) / images, wanted, problems)

    return gradients


def run(link: Link, h: Tensor) -> Passed[Tensor]:
    """Run one layer on h (P N, ...)."""
    module = link.module
    if isinstance(module, nn.Linear):
        return _linear(link.path, module, h)
    if isinstance(module, nn.Conv2d):
        return _convolution(link.path, module, h)
    if isinstance(module, nn.BatchNorm2d):
        return _batch_norm(link.path, module, h)
    return _free(module, h)


def _linear(path: str, layer: nn.Linear, r: Tensor) -> Passed[Tensor]:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()

    def read(delta: Tensor, problems: int) -> Params:
        d = delta.unflatten(0, (problems, -1)).flatten(1, -2)  # (P, N ..., K)
        found = {named(path, "weight"): torch.bmm(d.mT, r.unflatten(0, (problems, -1)).flatten(1, -2))}
        return found if bias is None else found | {named(path, "bias"): d.sum(1)}

    return Passed(nn.functional.linear(r, weight, bias), lambda delta: delta @ weight, read)


def _convolution(path: str, layer: nn.Conv2d, h: Tensor) -> Passed[Tensor]:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    g = Geometry.of(layer)

    def read(delta: Tensor, problems: int) -> Params:
        d = delta.unflatten(0, (problems, -1))  # (P, N, O, ...)
        found = {named(path, "weight"): weight_gradient(h.unflatten(0, (problems, -1)), d, g)}
        return found if bias is None else found | {named(path, "bias"): d.sum((1, 3, 4))}

    size = (h.shape[2], h.shape[3])
    return Passed(convolve(h, weight, bias, g), lambda delta: pull_back(delta, weight, size, g), read)


def _batch_norm(path: str, layer: nn.BatchNorm2d, h: Tensor) -> Passed[Tensor]:
    """Batch norm in eval mode: a fixed scale and shift per channel."""
    buffers = dict(layer.named_buffers())
    per_channel = (1, -1, 1, 1)
    std = (buffers["running_var"] + layer.eps).sqrt().view(per_channel)
    unit = (h - buffers["running_mean"].view(per_channel)) / std
    if not layer.affine:
        return Passed(unit, lambda delta: delta / std, lambda delta, problems: {})
    weight, bias = layer.weight.detach().view(per_channel), layer.bias.detach().view(per_channel)

    def read(delta: Tensor, problems: int) -> Params:
        d, u = delta.unflatten(0, (problems, -1)), unit.unflatten(0, (problems, -1))
        return {named(path, "weight"): (d * u).sum((1, 3, 4)), named(path, "bias"): d.sum((1, 3, 4))}

    return Passed(unit * weight + bias, lambda delta: delta * (weight / std), read)


def _free(module: nn.Module, h: Tensor) -> Passed[Tensor]:
    """A layer without parameters: a known derivative, or torch's."""

    def nothing(delta: Tensor, problems: int) -> Params:
        return {}

    if isinstance(module, _DROPOUTS):
        return Passed(h, lambda delta: delta, nothing)
    if isinstance(module, nn.Flatten):
        return Passed(h.flatten(1), lambda delta: delta.view(h.shape), nothing)
    if isinstance(module, nn.Sigmoid):
        s = torch.sigmoid(h)
        return Passed(s, lambda delta: delta * (s * (1 - s)), nothing)
    if isinstance(module, nn.Tanh):
        t = torch.tanh(h)
        return Passed(t, lambda delta: delta * (1 - t * t), nothing)
    if isinstance(module, nn.ReLU):
        a = torch.relu(h)
        return Passed(a, lambda delta: delta * (a > 0), nothing)
    result: Any = vjp(module, h.clone() if getattr(module, "inplace", False) else h)
    out, pull = result
    return Passed(out, lambda delta: pull(delta)[0], nothing)
