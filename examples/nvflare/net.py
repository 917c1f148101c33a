"""The network that both sides build."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """One convolution and a linear layer on 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, stride=2)
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.fc(torch.relu(self.conv(x)).flatten(1))
        return logits
