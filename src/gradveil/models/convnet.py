"""The networks of the gradient-similarity experiments: the paper's text and the authors' code differ."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.models.base import MODELS, Builder, Shape
from gradveil.models.parts import ACTIVATIONS, Activation, Init, Layers, chain, initialise

POOL = 0  # marks a pooling layer in a list of widths


@dataclass(frozen=True)
class _Convolutions:
    """How to make the convolutions: what both networks' settings come to."""

    kernel: int
    padding: int
    pool: int
    activation: str
    batchnorm: bool

    def features(self, channels: int, widths: tuple[int, ...]) -> Layers:
        layers: Layers = {}
        convs = pools = 0
        for width in widths:
            if width == POOL:
                pools += 1
                layers[f"pool{pools}"] = nn.MaxPool2d(self.pool)
                continue
            convs += 1
            layers[f"conv{convs}"] = nn.Conv2d(channels, width, self.kernel, padding=self.padding)
            if self.batchnorm:
                layers[f"norm{convs}"] = nn.BatchNorm2d(width)
            layers[f"act{convs}"] = ACTIVATIONS[self.activation]()
            channels = width
        return layers


@MODELS.register("convnet")
@dataclass(frozen=True)
class ConvNet(Builder):
    """Nine 5x5 convolutions, two max poolings of 3, one linear layer (Sun et al. 2020, appendix).

    The paper gives neither activation nor padding nor the pooling stride; with padding 2 and stride 3, r has
    1152 entries for 32x32. It does not train with PyTorch's initialisation: set ``batchnorm=true`` or
    ``init=kaiming``.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: int = 2
    pool: int = 3  # size and stride
    batchnorm: bool = False
    normalize: str = "none"  # none, half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: conv1, act1, ..., pool1, ..., flatten, fc."""
        stack = _Convolutions(5, self.padding, self.pool, self.activation, self.batchnorm)
        features = stack.features(input_shape[0], (32, 64, 64, 128, 128, 128, POOL, 128, 128, 128, POOL))
        model = chain("convnet", input_shape, self.normalize, features, lambda n: {"fc": nn.Linear(n, num_classes)})
        initialise(model, self.init, rng)
        return model


@MODELS.register("convnet_authors")
@dataclass(frozen=True)
class ConvNetAuthors(Builder):
    """The network that the authors' gradient-similarity script runs: eight 3x3 convolutions with batch norm.

    Widths are 1, 2, 2, 4, 4, 4 | 4, 4 times ``width`` (Geiping et al. 2020); r has 36 x width entries for
    32x32: 2304. It trains as it is.
    """

    activation: Activation = "relu"
    init: Init = "default"
    padding: int = 1
    pool: int = 3  # size and stride
    width: int = 64
    batchnorm: bool = True
    normalize: str = "none"  # none, half, or mean/std

    def build(self, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network: conv1, norm1, act1, ..., pool1, ..., flatten, fc."""
        widths = tuple(self.width * n for n in (1, 2, 2, 4, 4, 4, POOL, 4, 4, POOL))  # 0 stays POOL
        stack = _Convolutions(3, self.padding, self.pool, self.activation, self.batchnorm)
        features = stack.features(input_shape[0], widths)
        model = chain(
            "convnet_authors", input_shape, self.normalize, features, lambda n: {"fc": nn.Linear(n, num_classes)}
        )
        initialise(model, self.init, rng)
        return model
