"""Models that are a plain chain of layers."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules import module as hooks_of_all


@dataclass(frozen=True)
class Link:
    """One layer of a chain and its path in the model."""

    path: str
    module: nn.Module

    @property
    def has_parameters(self) -> bool:
        """Whether the layer has parameters, so a gradient of its own."""
        return next(self.module.parameters(), None) is not None


def sequential(model: nn.Module, until: str | None = None) -> list[Link] | None:
    """Return the layers in the order they run, or those before the layer ``until``; None where the model is no chain.

    A chain is an ``nn.Sequential`` (nested ones are opened) in which no hook and no replaced ``forward`` could act
    before the end is reached. What the layers themselves are is for the caller to check.
    """
    target = None if until is None else model.get_submodule(until)
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return None
    links: list[Link] = []
    for link in _opened(model, "", target):
        if link is None:
            return None
        if link.module is target:
            return links
        links.append(link)
    return links if target is None else None


def _opened(module: nn.Module, path: str, target: nn.Module | None) -> Iterator[Link | None]:
    if module is target:
        yield Link(path, module)
    elif (
        module._forward_pre_hooks
        or "forward" in module.__dict__
        or _hooked_on_the_way(module, target)
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        yield None
    elif type(module).forward is not nn.Sequential.forward:
        yield Link(path, module)
    else:
        for name, child in module._modules.items():  # named_children() skips a module that comes twice
            if child is not None:
                yield from _opened(child, f"{path}.{name}" if path else name, target)


def _hooked_on_the_way(module: nn.Module, target: nn.Module | None) -> bool:
    """Whether hooks run after the module, and that before the target is reached."""
    return bool(module._forward_hooks) and not any(part is target for part in module.modules())
