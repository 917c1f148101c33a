"""Residual networks with batch norm or group norm, for images from 8x8 upwards: resnet18 and mobilenet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.models.base import MODELS, Shape
from gradveil.models.parts import Chain, Init, Layers, Width

Norm = Literal["batch", "group"]


def _normed(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, norm: Norm = "batch"
) -> tuple[nn.Module, nn.Module]:
    """Return a convolution that keeps the size, but for its stride, and its normalisation, which has the bias."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
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
        """Return the block's output."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1 with no activation; a shortcut where the shape fits."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        widen = [*_normed(inputs, inner, 1), nn.ReLU6()] if expansion > 1 else []
        self.layers = nn.Sequential(
            *widen, *_normed(inner, inner, 3, stride, groups=inner), nn.ReLU6(), *_normed(inner, outputs, 1)
        )
        self.has_shortcut = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        y: Tensor = self.layers(x)
        return x + y if self.has_shortcut else y


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
        """Return conv1, norm1, act1, block1, ..., block8, pool."""
        conv, norm = _normed(input_shape[0], self.width, 3, norm=self.norm)
        layers: Layers = {"conv1": conv, "norm1": norm, "act1": nn.ReLU()}
        channels = self.width
        for i, stride in enumerate(_strides(input_shape, (1, 1, 2, 1, 2, 1, 2, 1))):
            outputs = self.width * 2 ** (i // 2)
            layers[f"block{i + 1}"] = ResidualBlock(channels, outputs, stride, self.norm)
            channels = outputs
        return layers | {"pool": nn.AdaptiveAvgPool2d(1)}


PUBLISHED = 32  # channels of MobileNetV2's first convolution
STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


@MODELS.register("mobilenet")
@dataclass(frozen=True)
class MobileNet(Chain):
    """MobileNetV2: 17 inverted residual blocks of depthwise convolutions, batch norm, ReLU6 (Sandler et al. 2018).

    ``width`` is that of the first convolution, 32 as published; all others have the published proportion to it, the
    last as well, so r has 40 x width entries. For small images the first two strides are 1 in place of 2, and no
    stride leaves fewer than 2x2 pixels. It trains with a learning rate of 0.1 and batches of 32.
    """

    width: Width = 16
    init: Init = "kaiming"
    normalize: str = "none"  # none, half, or mean/std

    def __post_init__(self) -> None:
        if self.width % 2:
            raise ValueError("width must be an even number.")

    def features(self, input_shape: Shape) -> Layers:
        """Return conv1, norm1, act1, block1, ..., block17, conv2, norm2, act2, pool."""
        conv, norm = _normed(input_shape[0], self.width, 3)
        layers: Layers = {"conv1": conv, "norm1": norm, "act1": nn.ReLU6()}
        blocks = [(t, c, s if i == 0 else 1) for t, c, n, s in STAGES for i in range(n)]
        channels = self.width
        strides = _strides(input_shape, [stride for _, _, stride in blocks])
        for i, ((expansion, published, _), stride) in enumerate(zip(blocks, strides, strict=True)):
            outputs = published * self.width // PUBLISHED
            layers[f"block{i + 1}"] = InvertedResidual(channels, outputs, stride, expansion)
            channels = outputs
        conv, norm = _normed(channels, 40 * self.width, 1)
        return layers | {"conv2": conv, "norm2": norm, "act2": nn.ReLU6(), "pool": nn.AdaptiveAvgPool2d(1)}
