"""What the networks share: activations, normalisation as a layer, initialisation, and the chain itself."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.errors import SpecError
from gradveil.models.base import Builder, Shape

Activation = Literal["sigmoid", "relu", "tanh", "softplus", "leaky_relu", "elu", "gelu", "silu"]
Init = Literal["uniform", "default", "kaiming"]

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
    """Shift and scale each channel: (x - mean) / std. Inside the model, so that attacks work on pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        shape = (-1, 1, 1) if len(mean) > 1 else ()
        self.register_buffer("mean", torch.tensor(mean).reshape(shape), persistent=False)
        self.register_buffer("std", torch.tensor(std).reshape(shape), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input, of the same shape."""
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        """Show the numbers in the module's text."""
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
    if len(numbers) not in (2, 2 * channels) or min(numbers[half:]) <= 0:
        raise SpecError(
            f"normalize={text!r} cannot be read: give none, half, or mean/std (or {channels} means and {channels} "
            "positive standard deviations, one per channel, all joined by '/')."
        )
    return Normalize(numbers[:half], numbers[half:])


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
        """Return the network; the length of the representation comes from a dry run."""
        model = nn.Sequential()
        norm = normalizer(self.normalize, input_shape[0])
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
