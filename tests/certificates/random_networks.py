"""Small random networks and pairs of images that try to come close to a bound."""

import torch
from torch import Generator, Tensor, nn

ACTIVATIONS = (nn.ReLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.ELU, nn.GELU, nn.SiLU, nn.Hardtanh)


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
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.copy_(torch.randn(m.num_features, generator=rng))
                m.running_var.copy_(0.3 + torch.rand(m.num_features, generator=rng))


def random_network(rng: Generator) -> tuple[nn.Sequential, tuple[int, int, int]]:
    """A chain of one to three convolutions, poolings, norms, activations and linear layers; the last is defended."""
    channels, side = pick(rng, 1, 2), pick(rng, 4, 7)
    shape = (channels, side, side)
    layers: list[nn.Module] = []
    for _ in range(pick(rng, 0, 2)):
        out, kernel = pick(rng, 1, 3), pick(rng, 1, 3)
        layers.append(nn.Conv2d(channels, out, kernel, pick(rng, 1, 2), pick(rng, 0, kernel - 1), bias=True))
        if pick(rng, 0, 3) == 0:
            layers.append(nn.BatchNorm2d(out))
        layers.append(ACTIVATIONS[pick(rng, 0, len(ACTIVATIONS) - 1)]())
        channels = out
        side = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[-1]
        if side >= 3 and pick(rng, 0, 2) == 0:
            window = pick(rng, 2, 3)
            pool = (nn.MaxPool2d, nn.AvgPool2d)[pick(rng, 0, 1)]
            layers.append(pool(window, pick(rng, 1, window)))
        side = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[-1]
        if side < 3:
            break
    layers.append(nn.Flatten())
    size = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[1]
    for _ in range(pick(rng, 0, 1)):
        out = pick(rng, 2, 8)
        layers += [nn.Linear(size, out), ACTIVATIONS[pick(rng, 0, len(ACTIVATIONS) - 1)]()]
        size = out
    model = nn.Sequential(*layers, nn.Linear(size, 2)).eval()
    fill(model, rng)
    return model, shape


def pairs(model: nn.Module, shape: tuple[int, ...], count: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Images X and X′ in [0, 1]: far apart, near, and along the direction in which r moves most."""
    x = torch.rand(count, *shape, generator=rng)
    other = torch.rand(count, *shape, generator=rng)
    reach = 10 ** (-3 * torch.rand(count, generator=rng)).reshape(-1, *[1] * len(shape))
    f = model[:-1]
    v = torch.randn(count, *shape, generator=rng)
    for _ in range(4):
        _, moved = torch.func.jvp(f, (x,), (v,))
        _, back = torch.func.vjp(f, x)
        v = back(moved)[0]
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *[1] * len(shape))
    near = x + reach * (other - x)
    steep = (x + reach * v).clamp(0, 1)
    which = torch.randint(0, 3, (count,), generator=rng).reshape(-1, *[1] * len(shape))
    return x, torch.where(which == 0, other, torch.where(which == 1, near, steep)).detach()
