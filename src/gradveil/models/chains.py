"""Networks that are plain chains of layers: lenet and convnet, on which attacks were published, and the small ones.

Of convnet, the paper's text and the authors' code differ. ``precode`` has a defence that is part of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from gradveil.models.base import MODELS, Shape
from gradveil.models.parts import ACTIVATIONS, Activation, Chain, Init, Layers, Padding, Width, Window

POOL = 0  # marks a pooling layer in a list of widths


class _Convolutions(Chain):
    """Convolutions of one size, each with an activation, and pooling between them."""

    activation: Activation
    padding: Padding
    batchnorm: bool

    def stack(
        self, channels: int, kernel: int, widths: Sequence[int], pool: int = 1, strides: Sequence[int] = ()
    ) -> Layers:
        layers: Layers = {}
        convs = pools = 0
        for width in widths:
            if width == POOL:
                pools += 1
                layers[f"pool{pools}"] = nn.MaxPool2d(pool)
                continue
            stride = strides[convs] if strides else 1
            convs += 1
            layers[f"conv{convs}"] = nn.Conv2d(channels, width, kernel, stride, self.padding)
            if self.batchnorm:
                layers[f"norm{convs}"] = nn.BatchNorm2d(width)
            layers[f"act{convs}"] = ACTIVATIONS[self.activation]()
            channels = width
        return layers


@MODELS.register("lenet")
@dataclass(frozen=True)
class LeNet(_Convolutions):
    """Four 5x5 convolutions of width 12 and one linear layer (Sun et al. 2020, appendix; Zhu et al. 2019).

    The defaults are those of the attacks: sigmoid, weights and biases uniform in ±0.5, strides 2, 2, 1, 1 and
    padding 2, so that r has 768 entries for 32x32 and 588 for 28x28. They hardly train.
    ``lenet:activation=relu,init=kaiming`` trains: learning rate 0.01 with batches of 32 on MNIST and CIFAR-10,
    0.2 with batches of 8 on digits.
    """

    activation: Activation = "sigmoid"
    init: Init = "uniform"
    strides: tuple[Window, ...] = (2, 2, 1, 1)  # one convolution each
    padding: Padding = 2
    width: Width = 12
    batchnorm: bool = False
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        return self.stack(input_shape[0], 5, [self.width] * len(self.strides), strides=self.strides)


@MODELS.register("convnet")
@dataclass(frozen=True)
class ConvNet(_Convolutions):
    """Nine 5x5 convolutions, two max poolings of 3, one linear layer (Sun et al. 2020, appendix).

    The paper gives neither activation nor padding nor the pooling stride; with padding 2 and stride 3, r has
    1152 entries for 32x32. It does not train with PyTorch's initialisation: set ``batchnorm=true`` or
    ``init=kaiming``.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: Padding = 2
    pool: Window = 3  # size and stride
    batchnorm: bool = False
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        return self.stack(input_shape[0], 5, (32, 64, 64, 128, 128, 128, POOL, 128, 128, 128, POOL), self.pool)


class GaussianSample(_DropoutNd):
    """Draw from the Gaussian that its input (N, 2K) describes; in eval mode its mean (N, K).

    It is dropout to whoever asks: its draws are a client's own, and nothing in eval mode.
    """

    def forward(self, statistics: Tensor) -> Tensor:
        mean, s = statistics.chunk(2, -1)
        return mean + F.softplus(s) * torch.randn_like(mean) if self.training else mean


@MODELS.register("precode")
@dataclass(frozen=True)
class Precode(LeNet):
    """LeNet with a variational bottleneck before its last layer, to make gradients random (Scheliga et al. 2022).

    r goes through ``encoder`` to means and spreads, a Gaussian sample is drawn, and ``decoder`` makes of it what the
    last layer gets. The paper's small penalty on the distance from a standard Gaussian (weight 0.001) is left out. All
    layers before the sample see r as it is, so that ``analytic`` reads r off the encoder's own gradient (Balunović et
    al. 2022).
    """

    size: Width = 256  # numbers that are drawn

    def head(self, length: int, num_classes: int) -> Layers:
        return {
            "encoder": nn.Linear(length, 2 * self.size),
            "sample": GaussianSample(),
            "decoder": nn.Linear(self.size, length),
            "fc": nn.Linear(length, num_classes),
        }


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
        return {}

    def head(self, length: int, num_classes: int) -> Layers:
        layers: Layers = {}
        for i, (before, after) in enumerate(zip((length, *self.widths), self.widths, strict=False), 1):
            layers |= {f"fc{i}": nn.Linear(before, after), f"act{i}": ACTIVATIONS[self.activation]()}
        return layers | {"fc": nn.Linear((length, *self.widths)[-1], num_classes)}
