"""Small random networks and pairs of images that try to come close to a bound."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

Layer = Callable[[], nn.Module]
ACTIVATIONS: tuple[Layer, ...] = (
    nn.ReLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.ELU, nn.GELU, nn.SiLU, nn.Hardtanh,
    nn.ReLU6, nn.SELU, partial(nn.CELU, 0.5), partial(nn.ELU, -0.5), partial(nn.ELU, 2.0),
    partial(nn.Softplus, 2.0, 40), partial(nn.LeakyReLU, -0.5), partial(nn.LeakyReLU, 1.5),
)  # fmt: skip


def pick(rng: Generator, low: int, high: int) -> int:
    """A whole number from low to high."""
    return int(torch.randint(low, high + 1, (1,), generator=rng))


def fill(module: nn.Module, rng: Generator) -> None:
    """Draw every parameter and statistic; sizes differ from net to net so that slopes are met everywhere."""
    scale = 0.3 + 1.5 * float(torch.rand(1, generator=rng))
    with torch.no_grad():
        for p in module.parameters():
            fan = p[0].numel() if p.ndim > 1 else 1
            p.copy_(torch.randn(p.shape, generator=rng) * scale / fan**0.5)
        for m in module.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                m.running_mean.copy_(torch.randn(m.num_features, generator=rng))
                m.running_var.copy_(0.3 + torch.rand(m.num_features, generator=rng))


def activation(rng: Generator) -> nn.Module:
    """One of the activations."""
    return ACTIVATIONS[pick(rng, 0, len(ACTIVATIONS) - 1)]()


def convolution(channels: int, rng: Generator) -> nn.Conv2d:
    """A convolution: any stride and padding, some grouped, some dilated, some with a normalised weight."""
    out, kernel = pick(rng, 1, 3), pick(rng, 1, 3)
    groups = 2 if channels == 2 and out == 2 and pick(rng, 0, 1) else 1
    dilation = pick(rng, 1, 2) if kernel == 2 else 1
    settings = {"groups": groups, "dilation": dilation, "bias": bool(pick(rng, 0, 3))}
    made = nn.Conv2d(channels, out, kernel, pick(rng, 1, 2), pick(rng, 0, kernel - 1), **settings)
    return weight_norm(made) if pick(rng, 0, 5) == 0 else made


def pooling(rng: Generator) -> nn.Module:
    """Max or average pooling, some padded, some with windows that stand over the edge."""
    window = pick(rng, 2, 3)
    settings = {"stride": pick(rng, 1, window), "padding": pick(rng, 0, 1), "ceil_mode": bool(pick(rng, 0, 1))}
    if pick(rng, 0, 1):
        return nn.MaxPool2d(window, **settings)
    return nn.AvgPool2d(window, **settings, count_include_pad=bool(pick(rng, 0, 1)))


def random_network(rng: Generator) -> tuple[nn.Sequential, tuple[int, int, int]]:
    """A chain of one to three convolutions, poolings, norms, activations and linear layers; the last is defended."""
    channels, side = pick(rng, 1, 2), pick(rng, 4, 7)
    shape = (channels, side, side)
    layers: list[nn.Module] = []

    def sizes() -> torch.Size:
        return nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape

    for _ in range(pick(rng, 0, 2)):
        layers.append(convolution(channels, rng))
        channels = sizes()[1]
        if pick(rng, 0, 3) == 0:
            layers.append(nn.BatchNorm2d(channels))
        layers.append(activation(rng))
        if sizes()[-1] >= 3 and pick(rng, 0, 2) == 0:
            layers.append(pooling(rng))
        if pick(rng, 0, 5) == 0:
            layers.append(nn.Dropout(0.5))
        if sizes()[-1] < 3:
            break
    layers.append(nn.Flatten())
    for _ in range(pick(rng, 0, 1)):
        layers.append(nn.Linear(sizes()[1], pick(rng, 2, 8)))
        if pick(rng, 0, 3) == 0:
            layers.append(nn.BatchNorm1d(sizes()[1]))
        layers.append(activation(rng))
    model = nn.Sequential(*layers, nn.Linear(sizes()[1], 2)).eval()
    fill(model, rng)
    return model, shape


def pairs(model: nn.Module, shape: tuple[int, ...], count: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Images X and X′ in [0, 1]: far apart, near, along the direction in which r moves most, and at a corner.

    The corner is the one where some entry of r is largest or least, to first order: the end of what can be reached.
    """
    f, each = model[:-1], [1] * len(shape)
    x = torch.rand(count, *shape, generator=rng)
    other = torch.rand(count, *shape, generator=rng)
    reach = 10 ** (-3 * torch.rand(count, generator=rng)).reshape(-1, *each)
    v = torch.randn(count, *shape, generator=rng)
    r, back = torch.func.vjp(f, x)
    for _ in range(4):
        _, moved = torch.func.jvp(f, (x,), (v,))
        v = back(moved)[0]
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *each)
    unit = torch.zeros_like(r).flatten(1)
    entry = torch.randint(0, unit.shape[1], (count, 1), generator=rng)
    unit.scatter_(1, entry, torch.randint(0, 2, (count, 1), generator=rng).float() * 2 - 1)
    corner = (back(unit.reshape(r.shape))[0] > 0).to(x.dtype)
    near = x + reach * (other - x)
    steep = (x + reach * v).clamp(0, 1)
    which = torch.randint(0, 4, (count,), generator=rng).reshape(-1, *each)
    found = torch.where(which == 0, other, torch.where(which == 1, near, torch.where(which == 2, steep, corner)))
    return x, found.detach()
