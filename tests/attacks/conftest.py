"""The network that attacks are tried on."""

import pytest
import torch
from torch import nn


@pytest.fixture
def network() -> nn.Module:
    """Wide enough, with weights spread out enough, that the gradient determines an 8x8 image."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2, stride=2), nn.Sigmoid(), nn.Conv2d(8, 8, 5, padding=2), nn.Sigmoid(),
            nn.Flatten(), nn.Linear(128, 5),
        )  # fmt: skip
        for p in model.parameters():
            nn.init.uniform_(p, -0.5, 0.5)
    return model
