"""Trial gradients of a chain with the first backward pass written out, so that one autograd pass is left.

With δ the loss's gradient at a layer's output b = W r: ∇W = δ rᵀ per problem, and Wᵀ δ goes on to the layer
before (for a convolution, the same on patches). Every step can be differentiated once more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vjp

from gradveil.gradients.convolution import Geometry, convolve, pull_back, weight_gradient
from gradveil.models.parts import Normalize
from gradveil.modules import Link, sequential
from gradveil.tree import Params, named

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
