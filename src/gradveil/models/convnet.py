"""The networks under attack: lenet of the DLG experiments, convnet of the gradient-similarity experiments.

Of the latter, the paper's text and the authors' code differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

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
        """Return conv1, act1, ..."""
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
        """Return conv1, act1, ..., pool1, ..."""
        return self.stack(input_shape[0], 5, (32, 64, 64, 128, 128, 128, POOL, 128, 128, 128, POOL), self.pool)


@MODELS.register("convnet_authors")
@dataclass(frozen=True)
class ConvNetAuthors(_Convolutions):
    """The network that the authors' gradient-similarity script runs: eight 3x3 convolutions with batch norm.

    Widths are 1, 2, 2, 4, 4, 4 | 4, 4 times ``width`` (Geiping et al. 2020); r has 36 x width entries for
    32x32: 2304. It trains as it is.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: Padding = 1
    pool: Window = 3  # size and stride
    width: Width = 64
    batchnorm: bool = True
    normalize: str = "none"  # none, half, or mean/std

    def features(self, input_shape: Shape) -> Layers:
        """Return conv1, norm1, act1, ..., pool1, ..."""
        widths = [self.width * n for n in (1, 2, 2, 4, 4, 4, POOL, 4, 4, POOL)]  # 0 stays POOL
        return self.stack(input_shape[0], 3, widths, self.pool)
