"""Networks that are chains of layers: those on which attacks were published, small ones, resnet18 and vit_tiny.

Of convnet, the paper's text and the authors' code differ. ``precode`` has a defence that is part of the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd, prod
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from gradveil.errors import SpecError
from gradveil.modalities import Modality
from gradveil.models.base import ACTIVATIONS, MODELS, Activation, Chain, Init, Layers, Rank, Shape, Width, low_rank
from gradveil.ranges import Range

Depth = Annotated[int, Range(1, 256)]  # in blocks
Window = Annotated[int, Range(1, 64)]  # of a convolution's stride, a pooling, a patch
Padding = Annotated[int, Range(0, 64)]


class _Convolutions(Chain):
    """5x5 convolutions, each with an activation."""

    activation: Activation
    padding: Padding
    batchnorm: bool

    def convolution(self, number: int, channels: int, width: int, stride: int = 1) -> Layers:
        layers: Layers = {f"conv{number}": nn.Conv2d(channels, width, 5, stride, self.padding)}
        if self.batchnorm:
            layers[f"norm{number}"] = nn.BatchNorm2d(width)
        return layers | {f"act{number}": ACTIVATIONS[self.activation]()}


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
        layers: Layers = {}
        for i, stride in enumerate(self.strides):
            layers |= self.convolution(i + 1, self.width if i else input_shape[0], self.width, stride)
        return layers


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
        layers: Layers = {}
        widths = (input_shape[0], 32, 64, 64, 128, 128, 128, 128, 128, 128)
        for i, (channels, width) in enumerate(pairwise(widths), 1):
            layers |= self.convolution(i, channels, width)
            if i % 3 == 0 and i > 3:  # after the sixth and the ninth
                layers[f"pool{i // 3 - 1}"] = nn.MaxPool2d(self.pool)
        return layers


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
        for i, width in enumerate(self.widths, 1):
            layers |= {f"fc{i}": nn.Linear(length, width), f"act{i}": ACTIVATIONS[self.activation]()}
            length = width
        return layers | {"fc": nn.Linear(length, num_classes)}


Norm = Literal["batch", "group"]


def _normed(
    inputs: int, outputs: int, kernel: int, stride: int = 1, norm: Norm = "batch"
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the size, but for its stride, and its normalisation, which has the bias."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs) if norm == "batch" else nn.GroupNorm(gcd(32, outputs), outputs)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm = "batch") -> None:
        super().__init__()
        self.conv1, self.norm1 = _normed(inputs, outputs, 3, stride, norm=norm)
        self.conv2, self.norm2 = _normed(outputs, outputs, 3, norm=norm)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normed(inputs, outputs, 1, stride, norm=norm))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def _strides(input_shape: Shape, wanted: Sequence[int]) -> Iterator[int]:
    """Yield the strides, 1 in place of 2 where fewer than 2x2 pixels would be left.

    Batch norm needs more than one number a channel, also of a single image.
    """
    side = min(input_shape[1:], default=0)
    for stride in wanted:
        chosen = stride if side > stride else 1
        side = -(-side // chosen)
        yield chosen


@MODELS.register("resnet18")
@dataclass(frozen=True)
class ResNet18(Chain):
    """ResNet-18 with the stem for small images: one 3x3 convolution, no pooling (He et al. 2016).

    Four stages of two blocks, ``width`` times 1, 2, 4, 8 channels; r has 8 x width entries, the mean over the pixels.
    11,173,962 weights for CIFAR-10; ``width=16`` has 701,466. Each stage but the first halves the image, as long as
    2x2 pixels are left. It trains with a learning rate of 0.03.
    """

    width: Width = 64
    init: Init = "kaiming"
    normalize: str = "none"  # none, half, or mean/std
    norm: Norm = "batch"  # or group, which looks at one image at a time

    def features(self, input_shape: Shape) -> Layers:
        conv, norm = _normed(input_shape[0], self.width, 3, norm=self.norm)
        layers: Layers = {"conv1": conv, "norm1": norm, "act1": nn.ReLU()}
        channels = self.width
        for i, stride in enumerate(_strides(input_shape, (1, 1, 2, 1, 2, 1, 2, 1))):
            outputs = self.width * 2 ** (i // 2)
            layers[f"block{i + 1}"] = ResidualBlock(channels, outputs, stride, self.norm)
            channels = outputs
        return layers | {"pool": nn.AdaptiveAvgPool2d(1)}


class Patches(nn.Module):
    """Cut an image into patches, one token each, with the class token before them and the positions added.

    Zeros are added at the right and below where the patches do not fit.
    """

    def __init__(self, input_shape: Shape, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(input_shape[0], width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + prod(ceil(n / patch) for n in input_shape[1:]), width))

    def forward(self, x: Tensor) -> Tensor:
        down, right = (-n % self.patch for n in x.shape[-2:])
        y = self.patches(F.pad(x, (0, right, 0, down))).flatten(2).mT
        return torch.cat([self.class_token.expand(len(y), -1, -1), y], 1) + self.positions


class SelfAttention(nn.Module):
    """Each token's mean over all tokens, weighted by how well queries and keys fit, in several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise SpecError(f"width={width} cannot be dealt out to {heads} heads.")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        fit = q @ k.mT * (width // self.heads) ** -0.5
        fit = fit if hidden is None else fit.masked_fill(hidden, -1e9)  # a row of them all is no row of NaN
        weights = fit.softmax(-1)  # can be differentiated twice everywhere
        out: Tensor = self.out((weights @ v).transpose(1, 2).reshape(n, tokens, width))
        return out


class TransformerBlock(nn.Module):
    """Attention, then a perceptron of four times the width; each sees normalised tokens and is added to them."""

    def __init__(self, width: int, heads: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps), SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), hidden)
        added: Tensor = self.perceptron(self.norm2(x))
        return x + added


class FirstToken(nn.Module):
    """Of the tokens, the class token alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


@MODELS.register("vit_tiny")
@dataclass(frozen=True)
class VisionTransformer(Chain):
    """A small vision transformer: patches, class token, learned positions, pre-norm, GELU (Dosovitskiy et al. 2021).

    No dropout. Patches of 4x4 make 64 tokens of 32x32, 49 of 28x28 and 4 of 8x8, beside the class token; r is the
    class token and has ``width`` entries. 208,074 weights for CIFAR-10. It trains with a learning rate of 0.03.
    """

    patch: Window = 4
    depth: Depth = 4
    width: Width = 64
    heads: Width = 4
    init: Init = "default"
    normalize: str = "none"  # none, half, or mean/std
    lora: Rank = 0  # of the low-rank factors that alone are trained, beside the last layer; 0: all weights are

    def features(self, input_shape: Shape) -> Layers:
        blocks = {f"block{i + 1}": TransformerBlock(self.width, self.heads) for i in range(self.depth)}
        tokens = Patches(input_shape, self.patch, self.width)
        return {"tokens": tokens, **blocks, "norm": nn.LayerNorm(self.width), "first": FirstToken()}

    def build(self, input_shape: Shape, num_classes: int, rng: Generator, modality: Modality) -> nn.Module:
        model = super().build(input_shape, num_classes, rng, modality)
        tokens = model.get_submodule("tokens")
        for name in ("class_token", "positions"):
            nn.init.normal_(tokens.get_parameter(name), std=0.02, generator=rng)
        return low_rank(model, self.lora, rng)
