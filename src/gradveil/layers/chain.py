"""A model as a chain of known layers, for the attacks that write its backward pass out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from gradveil.models.parts import Normalize

# Free of parameters, and one example's output depends on that example alone.
_ACTIVATIONS = (
    nn.Sigmoid, nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Hardtanh, nn.LogSigmoid, nn.Identity,
)  # fmt: skip
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)
_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.AlphaDropout)


@dataclass(frozen=True)
class Link:
    """One layer of a chain and its path in the model."""

    path: str
    module: nn.Module

    @property
    def has_parameters(self) -> bool:
        """Whether the layer has parameters, so a gradient of its own."""
        return next(self.module.parameters(), None) is not None


def walk(model: nn.Module) -> list[Link] | None:
    """Return the layers in the order they run, or None where the model is no chain of known layers.

    A chain is an ``nn.Sequential`` (nested ones are opened) of plain convolutions, linear layers, batch norm
    in eval mode, activations, poolings and flatten. Hooks, tied weights and anything else make it none.
    """
    links = list(_open(model, ""))
    seen = [id(link.module) for link in links if link.has_parameters]
    tied = len(seen) != len(set(seen)) or len(list(model.parameters())) != sum(
        len(list(link.module.parameters())) for link in links
    )
    if tied or any(_hooked(m) for m in model.modules()) or not all(_known(link.module) for link in links):
        return None
    return links


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
    found: dict[str, T] = {}
    for i in range(len(links) - 1, first - 1, -1):
        if links[i].path in owners:
            found |= passed[i].read(delta, problems)
        if i > first:
            delta = passed[i].back(delta)
    return {name: found[name] for name in names}


def _open(module: nn.Module, path: str) -> Iterator[Link]:
    if type(module).forward is not nn.Sequential.forward:
        yield Link(path, module)
        return
    for name, child in module._modules.items():  # named_children() skips a module that comes twice
        if child is not None:
            yield from _open(child, f"{path}.{name}" if path else name)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


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
