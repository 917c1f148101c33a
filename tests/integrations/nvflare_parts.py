"""A model and a site's examples that NVFlare's filters find by ``module:function``."""

import torch
from torch import Tensor, nn


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def one_example() -> tuple[Tensor, Tensor]:
    return torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([3])


def many_examples() -> tuple[Tensor, Tensor]:
    return torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(5)), torch.arange(20) % 5
