"""Builders of models, ``build`` from a spec or a user's function to a module that gives logits; parts of networks."""

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.errors import GradveilError, ModelError, SpecError, own_error
from gradveil.imports import calling, import_object, is_import_path
from gradveil.modalities import IMAGE, Modality
from gradveil.ranges import Range
from gradveil.registry import Registry

MEANT = ("logits", "out", "output", "prediction")  # names that say it


def _part_of(module: nn.Module, inputs: Any, output: Any, part: Any) -> Any:
    """Return one part of what a model returns, by key or position: a forward hook."""
    return output[part]


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
    model.register_forward_hook(partial(_part_of, part=part))
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
    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        """Return the network for examples of a kind, weights drawn from ``rng``: pixels in [0, 1] in, logits out."""


def build(
    spec: Source | Builder,
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
        return MODELS.build(spec).build(tuple(input_shape), num_classes, rng, modality)


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


Activation = Literal["sigmoid", "relu", "tanh", "softplus", "leaky_relu", "elu", "gelu", "silu"]
Init = Literal["uniform", "default", "kaiming"]
Width = Annotated[int, Range(1, 4096)]  # of a layer
Rank = Annotated[int, Range(0, 4096)]  # of low-rank factors
_FAR = 1e6  # from 1, for what normalises

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid, "relu": nn.ReLU, "tanh": nn.Tanh, "softplus": nn.Softplus, "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU, "gelu": nn.GELU, "silu": nn.SiLU,
}  # fmt: skip


class Normalize(nn.Module):
    """Shift and scale each channel: (x - mean) / std. Inside the model, so that attacks work on the examples."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], axes: int = 2) -> None:
        super().__init__()
        shape = (-1, *[1] * axes) if len(mean) > 1 else ()  # axes of one channel: of images two, of rows none
        self.register_buffer("mean", torch.tensor(mean).reshape(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def normalizer(text: str, channels: int) -> Normalize | None:
    """Read ``none``, ``half`` or the means and then the standard deviations joined by ``/``."""
    if text == "none":
        return None
    if text == "half":
        return Normalize([0.5], [0.5])
    try:
        numbers = [float(part) for part in text.split("/")]
    except ValueError:
        numbers = []
    half = len(numbers) // 2
    means, stds = numbers[:half], numbers[half:]
    fits = all(abs(mean) <= _FAR for mean in means) and all(1 / _FAR <= std <= _FAR for std in stds)
    if len(numbers) not in (2, 2 * channels) or not fits:
        raise SpecError(
            f"normalize={text!r} cannot be read: give none, half, or mean/std (or {channels} means and {channels} "
            "positive standard deviations, one per channel, all joined by '/')."
        )
    return Normalize(means, stds)


Layers = dict[str, nn.Module]


class Chain(Builder):
    """A network of named layers one after the other: normalisation, features, flatten, head."""

    init: str
    normalize: str  # none, half, or mean/std

    @abstractmethod
    def features(self, input_shape: Shape) -> Layers:
        """Return the layers before ``flatten``, for inputs of that shape."""

    def head(self, length: int, num_classes: int) -> Layers:
        """Return the layers after it, for a representation of that length."""
        return {"fc": nn.Linear(length, num_classes)}

    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        model = nn.Sequential()
        norm = normalizer(self.normalize, input_shape[0])
        if norm is None and modality.scaling is not None:
            norm = Normalize(*modality.scaling, axes=0)
        if norm is not None:
            model.add_module("normalize", norm)
        for name, layer in self.features(input_shape).items():
            model.add_module(name, layer)
        model.add_module("flatten", nn.Flatten())
        length = _output_length(self.spec_name, model, input_shape)
        for name, layer in self.head(length, num_classes).items():
            model.add_module(name, layer)
        initialise(model, self.init, rng)
        return model


def _output_length(name: str, model: nn.Module, input_shape: Shape) -> int:
    model.eval()
    try:
        with torch.no_grad():
            length = model(torch.zeros(1, *input_shape)).shape[1]
    except (RuntimeError, ValueError, IndexError) as error:
        length, reason = 0, str(error).splitlines()[0]
    else:
        reason = "nothing is left after the last pooling"
    model.train()
    if length == 0:
        raise SpecError(
            f"Model {name!r} cannot take inputs of shape {input_shape} ({reason}). It needs (channels, height, width) "
            "and larger images, or other settings (padding, strides, pool)."
        )
    return int(length)


def initialise(model: nn.Module, init: str, rng: Generator) -> None:
    """Draw all weights from ``rng``.

    ``uniform``: weights and biases in ±0.5, as Zhu et al. 2019 (DLG) have it; ``default``: PyTorch's own
    (weights and biases in ±1/√fan_in); ``kaiming``: He et al. 2015 for ReLU, biases 0; ``zeros``: all 0.
    """
    for layer in model.modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        own = 1 / math.sqrt(layer.weight[0].numel())
        weight = {"uniform": 0.5, "default": own, "kaiming": math.sqrt(6) * own, "zeros": 0.0}[init]
        bias = 0.0 if init == "kaiming" else weight
        nn.init.uniform_(layer.weight, -weight, weight, generator=rng)
        if layer.bias is not None:
            nn.init.uniform_(layer.bias, -bias, bias, generator=rng)


class LowRank(nn.Linear):
    """W x + B A x of a linear layer (Hu et al. 2022, LoRA): A and B alone are trained, B from zero."""

    def __init__(self, layer: nn.Linear, rank: int, rng: Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        like, bound = layer.weight, 1 / math.sqrt(layer.in_features)
        first = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=rng)
        self.lora_a = nn.Parameter(first.to(like))
        self.lora_b = nn.Parameter(like.new_zeros(layer.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + F.linear(F.linear(input, self.lora_a), self.lora_b)


def low_rank(model: nn.Module, rank: int, rng: Generator) -> nn.Module:
    """Freeze a model but for its head, and give factors to every other linear layer; rank 0 leaves it as it is."""
    if not rank:
        return model
    for p in model.parameters():
        p.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name == "fc":
            layer.requires_grad_(True)
        elif isinstance(layer, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LowRank(layer, rank, rng))
    return model
