"""What a model builder is, and ``build``: from a spec, a builder or a user's function to a module that gives logits."""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import GradveilError, ModelError, SpecError, own_error
from gradveil.imports import calling, import_object, is_import_path
from gradveil.modalities import IMAGE, Modality
from gradveil.registry import Registry

MEANT = ("logits", "out", "output", "prediction")  # names that say it


@dataclass(frozen=True)
class TakesOne:
    """A forward hook that returns one part of what a model returns."""

    part: Any  # key or position

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return output[self.part]


def take_one(model: nn.Module, name: str, output: Any) -> bool:
    """Let a model return the tensor of its output (a dict or tuple) that is meant; return whether that was needed."""
    if isinstance(output, Tensor) or not isinstance(output, Mapping | tuple | list):
        return False
    pairs = list(output.items() if isinstance(output, Mapping) else enumerate(output))
    tensors = {key: value for key, value in pairs if isinstance(value, Tensor) and value.is_floating_point()}
    part = next((key for key in MEANT if key in tensors), next(iter(tensors), None) if len(tensors) == 1 else None)
    if part is None:
        held = ", ".join(f"{key!r}: {tuple(value.shape)}" for key, value in tensors.items()) or "no tensor of numbers"
        raise ModelError(
            f"The model {name} returns a {type(output).__name__} with {held}. Return the logits alone: wrap it in a "
            f"module whose forward is, say, return self.model(x)[{next(iter(tensors), 'logits')!r}]."
        )
    model.register_forward_hook(TakesOne(part))
    return True


MODELS: Registry["Builder"] = Registry("model", "models")

Shape = tuple[int, ...]
BLANK = 2  # inputs that a model is tried on
AT_ONCE = 200  # public inputs that a fixed part works on
Source = str | nn.Module | Callable[..., nn.Module]


class Builder(ABC):
    """Settings are the dataclass fields; the call gets the shape of one input and a generator for the weights."""

    spec_name: ClassVar[str]
    takes: ClassVar[str] = "image"  # the modality of its inputs

    @abstractmethod
    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network with weights drawn from ``rng``: pixels in [0, 1] in, logits out."""

    def build_for(self, modality: Modality, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network for examples of a kind; by default that changes nothing."""
        return self.build(input_shape, num_classes, rng)


def build(
    spec: str | Builder | nn.Module | Callable[..., nn.Module],
    input_shape: Shape = (1, 28, 28),
    num_classes: int = 10,
    seed: int = 0,
    modality: Modality = IMAGE,
) -> nn.Module:
    """Return a network for inputs of that shape, e.g. ``lenet:activation=relu,init=kaiming``.

    ``package.module:function`` (or the function itself) gives a user's own; it is called with ``input_shape``,
    ``num_classes`` and ``modality`` (what an example is) where its signature takes them. A module is returned as it is.
    Weights depend on ``seed`` alone, and the global random state is left as it was.
    """
    if isinstance(spec, nn.Module):
        return spec
    if num_classes < 1 or any(n < 1 for n in input_shape):
        raise SpecError(f"A model needs sizes of at least 1; got input {input_shape} and {num_classes} classes.")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if isinstance(spec, str) and is_import_path(spec):
            return _own(import_object(spec), spec, tuple(input_shape), num_classes, modality)
        if callable(spec):
            return _own(spec, _name(spec), tuple(input_shape), num_classes, modality)
        rng = torch.Generator().manual_seed(seed)
        return MODELS.build(spec).build_for(modality, tuple(input_shape), num_classes, rng)


def build_working(
    source: Source,
    input_shape: Shape,
    num_classes: int,
    seed: int = 0,
    modality: Modality = IMAGE,
    *,
    sure_of_classes: bool = True,
) -> nn.Module:
    """Return what ``build`` does, after a copy of it ran forwards and backwards on a blank batch.

    Raises ``ModelError`` where it cannot, where there is not one logit for each class (of which one may not be sure),
    or where nothing can be trained.
    """
    model, name = build(source, input_shape, num_classes, seed, modality), _name(source)
    with torch.random.fork_rng(devices=[]):
        _try(model, name, tuple(input_shape), num_classes if sure_of_classes else 1, modality)
    return model


def _try(model: nn.Module, name: str, input_shape: Shape, least: int, modality: Modality) -> None:
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise ModelError(f"The model {name} has no parameter that can be trained, so there is no update to look at.")
    blank = torch.full((BLANK, *input_shape), modality.last, device=parameters[0].device)
    doing = "run"
    try:
        copied = copy.deepcopy(model)
        logits = copied(blank)
        if take_one(model, name, logits):
            take_one(copied, name, logits)
            logits = copied(blank)
        if isinstance(logits, Tensor) and logits.requires_grad:
            doing = "differentiated"
            trained = [p for p in copied.parameters() if p.requires_grad]
            torch.autograd.grad(logits.sum(), trained, allow_unused=True)
    except GradveilError:
        raise
    except Exception as error:
        if isinstance(error, IndexError) and modality.last:
            raise ModelError(
                f"The ids of the data go up to {modality.last:.0f} and the model {name} has no embedding for that one. "
                f"Give it a vocabulary of {modality.last + 1:.0f}, or the data a smaller one."
            ) from error
        raise ModelError(
            f"The model {name} cannot be {doing} on inputs of shape {input_shape}. The error is its own: "
            f"{own_error(error)}"
        ) from error
    flat = least <= 1 and isinstance(logits, Tensor) and logits.shape == (BLANK,)  # one number for each input
    if not flat and (
        not isinstance(logits, Tensor)
        or logits.ndim not in ((2, 3) if modality.last else (2,) if least > 1 else (2, 3, 4, 5))  # of places, or one
        or len(logits) != BLANK
        or logits.shape[-1] < least
    ):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        classes = f"each of the {least} classes" if least > 1 else "each class"
        raise ModelError(f"The model {name} gives {found} for {BLANK} inputs; it must give one logit for {classes}.")
    if not logits.requires_grad:
        raise ModelError(f"The model {name} gives logits that depend on no parameter that can be trained.")


def _name(source: object) -> str:
    if isinstance(source, nn.Module):
        return type(source).__name__
    return source if isinstance(source, str) else str(getattr(source, "__name__", repr(source)))


def _own(factory: Any, name: str, input_shape: Shape, num_classes: int, modality: Modality) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise SpecError(f"{name} is a {type(factory).__name__}; give a function or class that returns an nn.Module.")
    offered = {"input_shape": input_shape, "num_classes": num_classes, "modality": modality}
    with calling(f"The model {name} cannot be made", ModelError):
        taken = inspect.signature(factory).parameters
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
        model = factory(**{key: value for key, value in offered.items() if takes_all or key in taken})
    if not isinstance(model, nn.Module):
        raise SpecError(f"{name} returned a {type(model).__name__}; it must return an nn.Module.")
    return model


def fit_to_public(model: nn.Module, inputs: Tensor | None) -> None:
    """Let the fixed parts of a chain that learn from public inputs do so: those with a method ``fit``."""
    parts = list(model.children()) if isinstance(model, nn.Sequential) else []
    if inputs is None or not any(hasattr(part, "fit") for part in parts):
        return
    with torch.no_grad():
        x = inputs.to(next(model.parameters()))
        for part in parts:
            learn: Any = getattr(part, "fit", None)
            if learn is not None:
                learn(x)
            x = torch.cat([part(some) for some in x.split(AT_ONCE)])
