"""Look into one layer of any model: find it, and run the part before it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gradveil.errors import LayerError, did_you_mean

LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's linear and convolutional layers by path, in registration order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LINEAR)}


def find_layer(model: nn.Module, name: str | None = None) -> str:
    """Return the path of a linear or convolutional layer; ``None``: the last fully connected one."""
    known = linear_layers(model)
    if name is None:
        dense = [path for path, m in known.items() if isinstance(m, nn.Linear)] or list(known)
        if not dense:
            raise LayerError(f"{type(model).__name__} has no linear or convolutional layer to defend.")
        return dense[-1]
    if name not in known:
        raise LayerError(
            f"{type(model).__name__} has no linear or convolutional layer {name!r}. {did_you_mean(name, known)}"
            f"It has: {', '.join(known) or 'none'}. Pass one of these as layer=..., or leave it out to take the last."
        )
    return name


class _Reached(Exception):
    """Raised at the defended layer to skip the rest of the forward pass."""


@contextmanager
def held_statistics(model: nn.Module) -> Iterator[None]:
    """Within, batch norm in train mode treats the batch's mean and variance as constants."""

    def hold(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not module.training:
            return None
        x = args[0]
        over = [d for d in range(x.ndim) if d != 1]
        mean, var = x.detach().mean(over), x.detach().var(over, unbiased=False)
        return F.batch_norm(x, mean, var, module.weight, module.bias, False, 0.0, module.eps)  # type: ignore[arg-type]

    handles = [m.register_forward_hook(hold) for m in model.modules() if isinstance(m, _BATCH_NORM)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def prefix(model: nn.Module, layer: str) -> Callable[[Tensor], Tensor]:
    """Return f: x -> r, the input of ``layer``, as a function free of side effects.

    Parameters are detached, buffers are copied, batch statistics are held, and the random state is left
    as it was, so that dropout draws the masks that the caller's own forward pass draws from the same state.
    """
    target = model.get_submodule(layer)

    def f(x: Tensor) -> Tensor:
        caught: list[Tensor] = []

        def catch(_: nn.Module, args: tuple[Any, ...]) -> None:
            caught.append(args[0])
            raise _Reached

        state = {n: p.detach() for n, p in model.named_parameters()}
        state |= {n: b.detach().clone() for n, b in model.named_buffers()}
        handle = target.register_forward_pre_hook(catch)
        devices = [x.device] if x.is_cuda else []
        try:
            with torch.random.fork_rng(devices, enabled=model.training), held_statistics(model):
                functional_call(model, state, (x,))
        except _Reached:
            return caught[0]
        finally:
            handle.remove()
        raise LayerError(f"The forward pass of {type(model).__name__} never reached layer {layer!r}.")

    return f


def representation(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """Return r (N, ...), the input of ``layer``, without gradients."""
    with torch.no_grad():
        return prefix(model, layer)(x)
