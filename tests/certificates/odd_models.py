"""Models that a recorded chain could get wrong: each is certified rightly, or refused."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class Odd(nn.Module):
    """A linear layer, something odd, and the layer that is defended."""

    def __init__(self, odd: Callable[["Odd", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros(()))
        self.calls, self._odd = 0, odd

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self._odd(self, x, self.a(x)))


def _slice_in_place(_: Odd, x: Tensor, y: Tensor) -> Tensor:
    y[:, :3] *= 10
    return y


def _data_in_place(_: Odd, x: Tensor, y: Tensor) -> Tensor:
    y.data.mul_(3)
    return y


def _out_argument(_: Odd, x: Tensor, y: Tensor) -> Tensor:
    return torch.mul(y, 3, out=y)


def _counts(self: Odd, x: Tensor, y: Tensor) -> Tensor:
    self.calls += 1
    return y * (1 + 0.1 * self.calls)


def _counts_in_a_buffer(self: Odd, x: Tensor, y: Tensor) -> Tensor:
    self.count += 1
    return y * self.count


def _no_grad(_: Odd, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.relu(y)


ODD: dict[str, Callable[[Odd, Tensor, Tensor], Tensor]] = {
    "a slice in place": _slice_in_place,
    "data in place": _data_in_place,
    "an out argument": _out_argument,
    "floor division": lambda _, x, y: torch.div(y, 0.5, rounding_mode="floor"),
    "rounding": lambda _, x, y: y.round(),
    "another precision": lambda _, x, y: y.half().to(y.dtype),
    "a branch by item": lambda _, x, y: y * 10 if x.sum() > 4.5 else y,
    "a branch by list": lambda _, x, y: y * 10 if x.tolist()[0][0] > 0.9 else y,
    "a branch by array": lambda _, x, y: y * 10 if x.detach().numpy().max() > 0.9 else y,
    "a branch by where": lambda _, x, y: torch.where(x.sum(1, keepdim=True) > 4.5, 10 * y, y),
    "a mask": lambda _, x, y: y * (y > 0.3),
    "an indexed write": lambda _, x, y: y.index_fill(1, torch.tensor([0]), 0.0) * 3,
    "softplus, low threshold": lambda _, x, y: F.softplus(y, 1, 1),
    "elu, negative": lambda _, x, y: F.elu(y, -0.5),
    "selu": lambda _, x, y: F.selu(y),
    "celu, negative": lambda _, x, y: F.celu(y, -0.5),
    "clamp": lambda _, x, y: y.clamp(0, 0.1) * 5,
    "threshold": lambda _, x, y: F.threshold(y, 0.1, 2.0),
    "abs": lambda _, x, y: y.abs(),
    "noise": lambda _, x, y: y + 0.1 * torch.rand(6, dtype=y.dtype),
    "dropout left on": lambda _, x, y: F.dropout(y, 0.5, training=True),
    "examples mixed": lambda _, x, y: y - y.mean(0),
    "against the first": lambda _, x, y: y - y[:1],
    "rolled examples": lambda _, x, y: y.roll(1, 0),
    "batch norm by hand": lambda _, x, y: F.batch_norm(y, None, None, training=True),
    "layer norm": lambda _, x, y: F.layer_norm(y, (6,)),
    "a counter": _counts,
    "a counter in a buffer": _counts_in_a_buffer,
    "a no_grad block": _no_grad,
    "a residual": lambda _, x, y: x + y.tanh(),
    "a product": lambda _, x, y: y * x,
    "detached": lambda _, x, y: torch.sigmoid(y.detach()),
    "strided": lambda _, x, y: torch.tanh(y.view(-1, 2, 3).transpose(1, 2).flatten(1)),
}


def odd_model(name: str, dtype: torch.dtype) -> Odd:
    """One of them, drawn from a fixed seed, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Odd(ODD[name]).to(dtype).eval()


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].register_forward_hook(lambda _, args, out: 10 * out)
    return model


MODES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)),
    "batch norm, no statistics": lambda: nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 2)),
    "rrelu": lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 2)),
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)),
    "weight norm": lambda: nn.Sequential(weight_norm(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)),
    "a hook": _hooked,
}


def mode_model(name: str, dtype: torch.dtype, training: bool) -> nn.Module:
    """A model whose layers may act otherwise in training."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODES[name]().to(dtype).train(training)
