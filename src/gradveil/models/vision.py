"""Networks for images as people use them: resnet18 with batch or group norm, and vision transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, prod
from typing import Annotated, Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.modalities import Modality
from gradveil.models.base import MODELS, Shape
from gradveil.models.parts import Chain, Init, Layers, Rank, Width, Window, low_rank
from gradveil.ranges import Range

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
    depth: Annotated[int, Range(1, 256)] = 4
    width: Width = 64
    heads: Width = 4
    init: Init = "default"
    normalize: str = "none"  # none, half, or mean/std
    lora: Rank = 0  # of the low-rank factors that alone are trained, beside the last layer; 0: all weights are

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width % self.heads:
            raise ValueError(f"width={self.width} cannot be dealt out to {self.heads} heads.")

    def features(self, input_shape: Shape) -> Layers:
        blocks = {f"block{i + 1}": TransformerBlock(self.width, self.heads) for i in range(self.depth)}
        tokens = Patches(input_shape, self.patch, self.width)
        return {"tokens": tokens, **blocks, "norm": nn.LayerNorm(self.width), "first": FirstToken()}

    def build_for(self, modality: Modality, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        model = super().build_for(modality, input_shape, num_classes, rng)
        tokens = model.get_submodule("tokens")
        for name in ("class_token", "positions"):
            nn.init.normal_(tokens.get_parameter(name), std=0.02, generator=rng)
        return low_rank(model, self.lora, rng)
