"""Low-rank factors beside frozen weights (Hu et al. 2022, LoRA): W x + B A x, where A and B alone are trained."""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


class LowRank(nn.Linear):
    """A linear layer whose weight and bias stay, with factors of a rank. B is zero at the start, and so is dA."""

    def __init__(self, layer: nn.Linear, rank: int, rng: Generator) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        like, bound = layer.weight, 1 / math.sqrt(layer.in_features)
        first = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=rng)
        self.lora_a = nn.Parameter(first.to(like))
        self.lora_b = nn.Parameter(like.new_zeros(layer.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """Return what the frozen layer gives, and the factors' part."""
        return F.linear(input, self.weight, self.bias) + F.linear(F.linear(input, self.lora_a), self.lora_b)


def low_rank(model: nn.Module, rank: int, rng: Generator, head: str = "fc") -> nn.Module:
    """Freeze a model but for its head, and give factors to every other linear layer; rank 0 leaves it as it is."""
    if not rank:
        return model
    for p in model.parameters():
        p.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if name == head:
            layer.requires_grad_(True)
        elif isinstance(layer, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LowRank(layer, rank, rng))
    return model
