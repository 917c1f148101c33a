"""A vision transformer for small images."""

from dataclasses import dataclass
from math import ceil, prod
from typing import Annotated

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil.modalities import Modality
from gradveil.models.base import MODELS, Shape
from gradveil.models.lora import low_rank
from gradveil.models.parts import Chain, Init, Layers, Rank, Width, Window
from gradveil.ranges import Range


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
        """Return the tokens: (examples, tokens, width)."""
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
        """Return tokens of the same shape; ``hidden`` (..., tokens, tokens): those that a token does not see."""
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
        """Return tokens of the same shape."""
        x = x + self.attention(self.norm1(x), hidden)
        added: Tensor = self.perceptron(self.norm2(x))
        return x + added


class FirstToken(nn.Module):
    """Of the tokens, the class token alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (examples, width)."""
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
        """Return tokens, block1, ..., norm, first."""
        blocks = {f"block{i + 1}": TransformerBlock(self.width, self.heads) for i in range(self.depth)}
        tokens = Patches(input_shape, self.patch, self.width)
        return {"tokens": tokens, **blocks, "norm": nn.LayerNorm(self.width), "first": FirstToken()}

    def build_for(self, modality: Modality, input_shape: Shape, num_classes: int, rng: Generator) -> nn.Module:
        """Return the network; class token and positions are normal with a standard deviation of 0.02."""
        model = super().build_for(modality, input_shape, num_classes, rng)
        tokens = model.get_submodule("tokens")
        for name in ("class_token", "positions"):
            nn.init.normal_(tokens.get_parameter(name), std=0.02, generator=rng)
        return low_rank(model, self.lora, rng)
