"""The small networks of the leakage study: leaknet, probe and logistic regression."""

from dataclasses import dataclass
from typing import Literal

from torch import Generator, nn

from gradveil.models.base import MODELS, Builder, Shape
from gradveil.models.parts import ACTIVATIONS, Activation, Init, Layers, chain, initialise


@MODELS.register("leaknet")
@dataclass(frozen=True)
class LeakNet(Builder):
    """Two 5x5 convolutions with pooling and three linear layers (Sun et al. 2020, table 1).

    ReLU and no padding, so that the first linear layer has 400 inputs for 32x32. It trains as it is.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: int = 0
    pool: int = 2  # size and stride
    normalize: str = "none"  # none, half (as in the table's experiments), or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: conv1, act1, pool1, conv2, act2, pool2, flatten, fc1, act3, fc2, act4, fc3."""
        act = ACTIVATIONS[self.activation]
        features: Layers = {
            "conv1": nn.Conv2d(input_shape[0], 6, 5, padding=self.padding),
            "act1": act(),
            "pool1": nn.MaxPool2d(self.pool),
            "conv2": nn.Conv2d(6, 16, 5, padding=self.padding),
            "act2": act(),
            "pool2": nn.MaxPool2d(self.pool),
        }

        def head(length: int) -> Layers:
            return {
                "fc1": nn.Linear(length, 120),
                "act3": act(),
                "fc2": nn.Linear(120, 84),
                "act4": act(),
                "fc3": nn.Linear(84, num_classes),
            }

        model = chain("leaknet", input_shape, self.normalize, features, head)
        initialise(model, self.init, rng)
        return model


@MODELS.register("probe")
@dataclass(frozen=True)
class ProbeNet(Builder):
    """One 5x5 convolution of width 12 and one linear layer (Sun et al. 2020, the WG / CLG / Rep study).

    Activation, stride and padding are not given there. The defaults (ReLU, stride 1, no padding) show the
    paper's claim best; ``probe:activation=sigmoid,init=uniform,stride=2,padding=2`` is the other reading.
    """

    activation: Activation = "relu"
    init: Init = "default"
    stride: int = 1
    padding: int = 0
    width: int = 12
    normalize: str = "none"  # none, half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: conv1, act1, flatten, fc."""
        features: Layers = {
            "conv1": nn.Conv2d(input_shape[0], self.width, 5, self.stride, self.padding),
            "act1": ACTIVATIONS[self.activation](),
        }
        model = chain("probe", input_shape, self.normalize, features, lambda n: {"fc": nn.Linear(n, num_classes)})
        initialise(model, self.init, rng)
        return model


@MODELS.register("logistic")
@dataclass(frozen=True)
class Logistic(Builder):
    """Multinomial logistic regression: the representation is the input itself. Convex, so it trains."""

    init: Literal["uniform", "default", "kaiming", "zeros"] = "default"
    normalize: str = "none"  # none, half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: flatten, fc."""
        model = chain("logistic", input_shape, self.normalize, {}, lambda n: {"fc": nn.Linear(n, num_classes)})
        initialise(model, self.init, rng)
        return model
