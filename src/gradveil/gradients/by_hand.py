"""Trial gradients of a chain with the first backward pass written out, so that one autograd pass is left.

With δ the loss's gradient at a layer's output b = W r: ∇W = δ rᵀ per problem, and Wᵀ δ goes on to the layer
before (for a convolution, the same on patches). Every step can be differentiated once more. A patch is a row (kernel,
channels) with the channels side by side, so that it is copied in long runs, and the way back to the input is another
such product or a grouped convolution, not a scatter.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vjp

from gradveil.models.base import Normalize
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


LARGE = 2**17  # entries of an image from which, on a GPU, a grouped convolution beats another copy into patches


def patches(h: Tensor, g: Geometry) -> Tensor:
    """Return the patches of h (P, N, C, H, W) as rows (P, N * positions, kernel * C)."""
    (kh, kw), (sh, sw), (ph, pw) = g.kernel, g.stride, g.padding
    image = F.pad(h.permute(0, 1, 3, 4, 2), (0, 0, pw, pw, ph, ph)).contiguous()  # (P, N, H, W, C)
    problems, images, height, width, channels = image.shape
    shape = (problems * images, (height - kh) // sh + 1, (width - kw) // sw + 1, kh, kw * channels)
    row = width * channels
    view = image.as_strided(shape, (height * row, sh * row, sw * channels, row, 1))
    return view.reshape(problems, images * shape[1] * shape[2], -1)


def weight_gradient(h: Tensor, delta: Tensor, g: Geometry) -> Tensor:
    """Return the kernel's gradient per problem (P, O, C, *kernel) from h (P, N, C, H, W), delta (P, N, O, ...).

    It can be differentiated once.
    """
    out: Tensor = _WeightGradient.apply(h, delta, g)
    return out


class _WeightGradient(torch.autograd.Function):
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
    if delta.is_cuda:
        return _by_input_on_a_gpu(delta, bar, size, g)
    problems, images = delta.shape[:2]
    side = delta.transpose(0, 1).flatten(1, 2)  # (N, P O, ...)
    return pull_back(side, bar.flatten(0, 1), size, g, problems).view(images, problems, -1, *size).transpose(0, 1)


def _by_input_on_a_gpu(delta: Tensor, bar: Tensor, size: Pair, g: Geometry) -> Tensor:
    """Return the same; a transposed convolution of P groups would be P convolutions there, one after the other."""
    found: Tensor
    problems, images = delta.shape[:2]
    if g.stride != (1, 1):
        by_problem = delta.transpose(1, 2).flatten(2)  # (P, O, N * positions)
        columns = torch.bmm(bar.flatten(2).mT, by_problem).unflatten(2, (images, -1)).transpose(1, 2)
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


def pull_back(delta: Tensor, weight: Tensor, size: Pair, g: Geometry, groups: int = 1) -> Tensor:
    """Return the transposed convolution (B, C, *size); weight (groups * O, C, *kernel), delta (B, groups * O, ...)."""
    outside = [
        full + 2 * p - (o - 1) * s - k
        for full, p, o, s, k in zip(size, g.padding, delta.shape[2:], g.stride, g.kernel, strict=True)
    ]
    return F.conv_transpose2d(delta, weight, None, g.stride, g.padding, outside, groups)


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


@dataclass(frozen=True)
class Passed:
    """A layer that was run on the examples of all problems: its output, and two ways to use δ."""

    output: Tensor
    back: Callable[[Tensor], Tensor]  # δ, the loss's gradient at the output -> the one at the input
    read: Callable[[Tensor, int], Params] = lambda delta, problems: {}  # δ, number of problems -> the layer's gradients


def pays(links: Sequence[Link], device: torch.device) -> bool:
    """Whether the written-out form is the faster one here: on a GPU, and for narrow networks on a CPU."""
    return device.type == "cuda" or not wide(link.module for link in links)


def wide(modules: Iterable[nn.Module]) -> bool:
    """Whether there are convolutions so wide that what they compute takes longer than copies and launches."""
    return any(m.out_channels >= WIDE for m in modules if isinstance(m, nn.Conv2d))


def manual_gradients(links: Sequence[Link], wanted: Sequence[str]) -> Callable[[Tensor, Tensor], Params]:
    """Return (x, y) -> gradient by the wanted parameters, per problem; x (P, N, *shape), y (P, N, K)."""
    owners = {name.rpartition(".")[0] for name in wanted}
    first = min(i for i, link in enumerate(links) if link.path in owners)  # no layer before it is passed back

    def gradients(x: Tensor, y: Tensor) -> Params:
        problems, images = x.shape[:2]
        h, steps, found = x.flatten(0, 1), [], Params()  # (P N, ...)
        for link in links:
            steps.append(run(link, h))
            h = steps[-1].output
        delta = (h.softmax(-1) - y.flatten(0, 1)) / images
        for i in range(len(links) - 1, first - 1, -1):
            if links[i].path in owners:
                found |= steps[i].read(delta, problems)
            if i > first:
                delta = steps[i].back(delta)
        return {name: found[name] for name in wanted}

    return gradients


def run(link: Link, h: Tensor) -> Passed:
    """Run one layer on h (P N, ...)."""
    module = link.module
    if isinstance(module, nn.Linear):
        return _linear(link.path, module, h)
    if isinstance(module, nn.Conv2d):
        return _convolution(link.path, module, h)
    if isinstance(module, nn.BatchNorm2d):
        return _batch_norm(link.path, module, h)
    return _free(module, h)


def _linear(path: str, layer: nn.Linear, r: Tensor) -> Passed:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()

    def read(delta: Tensor, problems: int) -> Params:
        d = delta.unflatten(0, (problems, -1)).flatten(1, -2)  # (P, N ..., K)
        found = {named(path, "weight"): torch.bmm(d.mT, r.unflatten(0, (problems, -1)).flatten(1, -2))}
        return found if bias is None else found | {named(path, "bias"): d.sum(1)}

    return Passed(nn.functional.linear(r, weight, bias), lambda delta: delta @ weight, read)


def _convolution(path: str, layer: nn.Conv2d, h: Tensor) -> Passed:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    g = Geometry.of(layer)

    def read(delta: Tensor, problems: int) -> Params:
        d = delta.unflatten(0, (problems, -1))  # (P, N, O, ...)
        found = {named(path, "weight"): weight_gradient(h.unflatten(0, (problems, -1)), d, g)}
        return found if bias is None else found | {named(path, "bias"): d.sum((1, 3, 4))}

    size = (h.shape[2], h.shape[3])
    out = F.conv2d(h, weight, bias, g.stride, g.padding)
    return Passed(out, lambda delta: pull_back(delta, weight, size, g), read)


def _batch_norm(path: str, layer: nn.BatchNorm2d, h: Tensor) -> Passed:
    """Batch norm in eval mode: a fixed scale and shift per channel."""
    buffers = dict(layer.named_buffers())
    per_channel = (1, -1, 1, 1)
    std = (buffers["running_var"] + layer.eps).sqrt().view(per_channel)
    unit = (h - buffers["running_mean"].view(per_channel)) / std
    if not layer.affine:
        return Passed(unit, lambda delta: delta / std)
    weight, bias = layer.weight.detach().view(per_channel), layer.bias.detach().view(per_channel)

    def read(delta: Tensor, problems: int) -> Params:
        d, u = delta.unflatten(0, (problems, -1)), unit.unflatten(0, (problems, -1))
        return {named(path, "weight"): (d * u).sum((1, 3, 4)), named(path, "bias"): d.sum((1, 3, 4))}

    return Passed(unit * weight + bias, lambda delta: delta * (weight / std), read)


def _free(module: nn.Module, h: Tensor) -> Passed:
    """A layer without parameters: a known derivative, or torch's."""
    if isinstance(module, _DROPOUTS):
        return Passed(h, lambda delta: delta)
    if isinstance(module, nn.Flatten):
        return Passed(h.flatten(1), lambda delta: delta.view(h.shape))
    if isinstance(module, nn.Sigmoid):
        s = torch.sigmoid(h)
        return Passed(s, lambda delta: delta * (s * (1 - s)))
    if isinstance(module, nn.Tanh):
        t = torch.tanh(h)
        return Passed(t, lambda delta: delta * (1 - t * t))
    if isinstance(module, nn.ReLU):
        a = torch.relu(h)
        return Passed(a, lambda delta: delta * (a > 0))
    result: Any = vjp(module, h.clone() if getattr(module, "inplace", False) else h)
    out, pull = result
    return Passed(out, lambda delta: pull(delta)[0])
