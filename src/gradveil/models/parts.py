"""What the networks share: activations, normalisation, initialisation, the chain itself, low-rank factors."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from gradveil.errors import SpecError
from gradveil.modalities import IMAGE, Modality
from gradveil.models.base import Builder, Shape
from gradveil.ranges import Range

Activation = Literal["sigmoid", "relu", "tanh", "softplus", "leaky_relu", "elu", "gelu", "silu"]
Init = Literal["uniform", "default", "kaiming"]
Width = Annotated[int, Range(1, 4096)]  # of a layer
Window = Annotated[int, Range(1, 64)]  # of a convolution's stride, a pooling, a patch
Rank = Annotated[int, Range(0, 4096)]  # of low-rank factors
Padding = Annotated[int, Range(0, 64)]
_FAR = 1e6  # from 1, for what normalises

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


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

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        return self.build_for(IMAGE, input_shape, num_classes, rng)

    def build_for(self, modality: Modality, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
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


def _output_length(name: str, model: nn.Module, input_shape: tuple[int, ...]) -> int:
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
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            _initialise_layer(module, init, rng)


def _initialise_layer(layer: nn.Linear | nn.Conv2d, init: str, rng: Generator) -> None:
    bound = 1 / math.sqrt(layer.weight[0].numel())
    weight, bias = {
        "uniform": (0.5, 0.5),
        "default": (bound, bound),
        "kaiming": (math.sqrt(6) * bound, 0.0),
        "zeros": (0.0, 0.0),
    }[init]
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


def low_rank(model: nn.Module, rank: int, rng: Generator, head: str = "fc") -> nn.Module:
    """Freeze a model but for its head, and give factors to every other linear layer; rank 0 leaves it as it is."""
    if not rank:
        return model
    for p in model.parameters():
        p.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name == head:
            layer.requires_grad_(True)
        elif isinstance(layer, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LowRank(layer, rank, rng))
    return model
