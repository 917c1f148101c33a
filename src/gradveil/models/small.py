"""The small networks: leaknet and probe of the leakage study, logistic regression and the multilayer perceptron."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from gradveil.models.base import MODELS, Shape
from gradveil.models.parts import ACTIVATIONS, Activation, Chain, Init, Layers, Padding, Width, Window


@MODELS.register("leaknet")
@dataclass(frozen=True)
class LeakNet(Chain):
    """Two 5x5 convolutions with pooling and three linear layers (Sun et al. 2020, table 1).

    ReLU and no padding, so that the first linear layer has 400 inputs for 32x32. It trains as it is.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: Padding = 0
    pool: Window = 2  # size and stride
    normalize: str = "none"  # none, half (as in the table's experiments), or mean/std

    def features(self, input_shape: Shape) -> Layers:
        """Return conv1, act1, pool1, conv2, act2, pool2."""
        act = ACTIVATIONS[self.activation]
        return {
            "conv1": nn.Conv2d(input_shape[0], 6, 5, padding=self.padding),
            "act1": act(),
            "pool1": nn.MaxPool2d(self.pool),
            "conv2": nn.Conv2d(6, 16, 5, padding=self.padding),
            "act2": act(),
            "pool2": nn.MaxPool2d(self.pool),
        }

    def head(self, length: int, num_classes: int) -> Layers:
        """Return fc1, act3, fc2, act4, fc3."""
        act = ACTIVATIONS[self.activation]
        return {
            "fc1": nn.Linear(length, 120),
            "act3": act(),
            "fc2": nn.Linear(120, 84),
            "act4": act(),
            "fc3": nn.Linear(84, num_classes),
        }


@MODELS.register("probe")
@dataclass(frozen=True)
class ProbeNet(Chain):
    """One 5x5 convolution of width 12 and one linear layer (Sun et al. 2020, the WG / CLG / Rep study).

    Activation, stride and padding are not given there. The defaults (ReLU, stride 1, no padding) show the
    paper's claim best; ``probe:activation=sigmoid,init=uniform,stride=2,padding=2`` is the other reading.
    """

    activation: Activation = "relu"
    init: Init = "default"
    stride: Window = 1
    padding: Padding = 0
    width: Width = 12
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        """Return conv1, act1."""
        return {
            "conv1": nn.Conv2d(input_shape[0], self.width, 5, self.stride, self.padding),
            "act1": ACTIVATIONS[self.activation](),
        }


@MODELS.register("logistic")
@dataclass(frozen=True)
class Logistic(Chain):
    """Multinomial logistic regression: the representation is the input itself. Convex, so it trains."""

    init: Literal["uniform", "default", "kaiming", "zeros"] = "default"
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        """Return nothing."""
        return {}


@MODELS.register("mlp")
@dataclass(frozen=True)
class Mlp(Chain):
    """Fully connected layers, for rows of a table: two of 100 with ReLU, as in Vero et al. 2023.

    A table's columns are standardised in its first layer, which is not trained.
    """

    widths: tuple[Width, ...] = (100, 100)
    activation: Activation = "relu"
    init: Init = "default"
    normalize: str = "none"  # none, half, or mean/std; of a table none is by its columns

    def features(self, input_shape: Shape) -> Layers:
        """Return nothing."""
        return {}

    def head(self, length: int, num_classes: int) -> Layers:
        """Return fc1, act1, fc2, act2, ..., fc."""
        layers: Layers = {}
        for i, (before, after) in enumerate(zip((length, *self.widths), self.widths, strict=False), 1):
            layers |= {f"fc{i}": nn.Linear(before, after), f"act{i}": ACTIVATIONS[self.activation]()}
        return layers | {"fc": nn.Linear((length, *self.widths)[-1], num_classes)}
