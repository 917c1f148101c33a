"""What a model builder is, and ``build``: from a spec, a builder or a user's function to a module."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Generator, nn

from gradveil.errors import SpecError
from gradveil.registry import Registry, import_object, is_import_path

MODELS: Registry["Builder"] = Registry("model", "gradveil.models")

Shape = tuple[int, ...]


class Builder(ABC):
    """Settings are the dataclass fields; the call gets the shape of one input and a generator for the weights."""

    spec_name: ClassVar[str]

    @abstractmethod
    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network with weights drawn from ``rng``: pixels in [0, 1] in, logits out."""


def build(
    spec: str | Builder | nn.Module | Callable[..., nn.Module],
    input_shape: Shape = (1, 28, 28),
    num_classes: int = 10,
    seed: int = 0,
) -> nn.Module:
    """Return a network for inputs of that shape, e.g. ``lenet:activation=relu,init=kaiming``.

    ``package.module:function`` (or the function itself) gives a user's own; it is called with ``input_shape``
    and ``num_classes`` where its signature takes them. A module is returned as it is. Weights depend on
    ``seed`` alone, and the global random state is left as it was.
    """
    if isinstance(spec, nn.Module):
        return spec
    if num_classes < 1 or any(n < 1 for n in input_shape):
        raise SpecError(f"A model needs sizes of at least 1; got input {input_shape} and {num_classes} classes.")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if isinstance(spec, str) and is_import_path(spec):
            return _own(import_object(spec), spec, tuple(input_shape), num_classes)
        if callable(spec):
            return _own(spec, getattr(spec, "__name__", repr(spec)), tuple(input_shape), num_classes)
        rng = torch.Generator().manual_seed(seed)
        return MODELS.build(spec).build(tuple(input_shape), num_classes, rng)


def _own(factory: Any, name: str, input_shape: Shape, num_classes: int) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise SpecError(f"{name} is a {type(factory).__name__}; give a function or class that returns an nn.Module.")
    taken = inspect.signature(factory).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
    offered = {"input_shape": input_shape, "num_classes": num_classes}
    model = factory(**{key: value for key, value in offered.items() if takes_all or key in taken})
    if not isinstance(model, nn.Module):
        raise SpecError(f"{name} returned a {type(model).__name__}; it must return an nn.Module.")
    return model
