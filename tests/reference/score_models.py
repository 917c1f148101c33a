"""Small models of every kind that leak scores have to cope with, all in double precision."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block with gating, concatenation, padding, slices, in-place activation and a sum over places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.gate, self.fc = nn.Linear(2, 2), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(F.relu(self.a(x))).tanh() + x
        h = h * self.gate(h.mean((2, 3))).sigmoid()[:, :, None, None]
        h = torch.cat([2 - h / 3, x * 0.5, h[:, 1:]], dim=1)
        h += 1
        h = F.relu_(F.pad(h, (1, 0, 2, 1)) - 0.9)
        h = h.permute(0, 2, 3, 1).reshape(len(x), -1, 5).sum(1)
        return self.fc(torch.cat([h, -h[:, :2]], dim=1))


class Attention(nn.Module):
    """A transformer layer over rows of the image, with layer norm: no explicit maps, so by differentiation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.fc = nn.Linear(24, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(x.flatten(1)[:, :24].reshape(len(x), 6, 4)).flatten(1))


class Branching(nn.Module):
    """What it does depends on the values it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(50, 6), nn.Linear(50, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.fc(torch.sigmoid(self.a(x) if x.sum() > 0 else self.b(x)))


def _chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


# name -> (model, layer, shape of one input)
BUILDERS: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...]]] = {
    "linear": (lambda: _chain(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 2)), "2", (6,)),
    "identity": (lambda: _chain(nn.Flatten(), nn.Linear(50, 2)), "1", (2, 5, 5)),
    "strided": (
        lambda: _chain(
            nn.Conv2d(2, 3, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Flatten(),
            nn.Linear(27, 2),
        ), "5", (2, 5, 5),
    ),
    "even": (
        lambda: _chain(
            nn.Conv2d(1, 3, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(3, 3, 5, 2, 2), nn.Sigmoid(), nn.Conv2d(3, 2, 5, 1, 2),
            nn.Sigmoid(), nn.Flatten(), nn.Linear(8, 2),
        ), "7", (1, 8, 8),
    ),
    "pooled": (
        lambda: _chain(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(6, 2),
        ), "7", (2, 5, 5),
    ),
    "overlapping pools": (
        lambda: _chain(
            nn.Conv2d(2, 3, 3), nn.ELU(), nn.MaxPool2d(3, 1, 1), nn.SiLU(), nn.AvgPool2d(2, 1, 1, False, False),
            nn.AdaptiveAvgPool2d((2, 3)), nn.GELU(), nn.Flatten(), nn.Linear(18, 2),
        ), "8", (2, 5, 5),
    ),
    "grouped": (
        lambda: _chain(
            nn.Conv2d(2, 4, 3, groups=2, stride=2, padding=1), nn.LeakyReLU(), nn.Conv2d(4, 4, 2, dilation=2),
            nn.Hardtanh(), nn.Flatten(), nn.Linear(4, 2),
        ), "5", (2, 5, 5),
    ),
    "batch norm": (
        lambda: _chain(
            nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(27, 4),
            nn.BatchNorm1d(4, track_running_stats=False), nn.Mish(), nn.Linear(4, 2),
        ), "7", (2, 5, 5),
    ),
    "instance norm": (  # writes to its buffers in train mode
        lambda: _chain(
            nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Tanh(), nn.Flatten(),
            nn.Linear(27, 2),
        ), "4", (2, 5, 5),
    ),
    "dropout": (
        lambda: _chain(
            nn.Conv2d(2, 3, 3), nn.Dropout2d(0.4), nn.Softplus(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(27, 2)
        ), "5", (2, 5, 5),
    ),
    "sequence": (
        lambda: _chain(nn.Conv1d(2, 3, 2), nn.CELU(), nn.Linear(4, 3), nn.SELU(), nn.Flatten(), nn.Linear(9, 2)),
        "5", (2, 5),
    ),
    "volume": (
        lambda: _chain(nn.Conv3d(1, 2, 2), nn.ReLU6(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(2, 2)),
        "4", (1, 3, 3, 3),
    ),
    "normalised": (
        lambda: _chain(
            nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Hardswish(), nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 2)
        ), "5", (2, 5, 5),
    ),
    "residual": (Residual, "fc", (2, 5, 5)),
    "attention": (Attention, "fc", (2, 5, 5)),
    "attention with dropout": (lambda: Attention(0.2), "fc", (2, 5, 5)),
    "branching": (Branching, "fc", (2, 5, 5)),
    "wide": (lambda: _chain(nn.Linear(4, 30), nn.Sigmoid(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2)), "4", (4,)),
    "convolution defended": (
        lambda: _chain(nn.Conv2d(2, 3, 3, 2, 1), nn.Sigmoid(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2, 2)),
        "2", (2, 5, 5),
    ),
}  # fmt: skip


def make(name: str, examples: int = 3, seed: int = 0) -> tuple[nn.Module, str, Tensor]:
    """Return a model in train mode, the layer to defend, and inputs; some entries of r are dead where ReLU is used."""
    build, layer, shape = BUILDERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().double()
        for module in model.modules():
            if "Norm" in type(module).__name__:  # whose weights start as ones
                for parameter in module.parameters():
                    nn.init.uniform_(parameter, 0.5, 1.5)
                for name, buffer in module.named_buffers():
                    if name.startswith("running"):
                        buffer.uniform_(0.5, 1.5)
        x = torch.randn(examples, *shape, dtype=torch.float64)
    return model, layer, x
