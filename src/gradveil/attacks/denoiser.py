"""A small denoising network, trained on public images: what images look like, beyond a mean and a covariance.

D(x; σ) is the mean of the images of a class that x may come from, if it has noise of σ. Of Gaussian images that is the
Wiener filter; the network learns what is missing beside it. Training ends where public images that were held out are
denoised best, and at each noise level that share of what the network says is taken that errs least on them: none, where
it helps nothing.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from gradveil import pace
from gradveil.attacks.gauss_newton.equations import Prior
from gradveil.seeds import Seeds
from gradveil.types import Batch

BATCH = 64
LR = 4e-3
WARM = 20  # steps until the rate is whole
AVERAGED = 0.998  # share of the averaged weights that a step keeps
HELD_OUT, MOST_HELD_OUT = 8, 250  # one in so many public images is not learned from, and no more than so many
TRIED = 4  # draws of noise for each image that was held out
LOOKS = 10  # times that the network is tried on them, in training
TOGETHER = 1024  # images that are denoised at once
UNNAMED = 0.1  # share of images whose class is not told to the network


class Block(nn.Module):
    """Two convolutions beside the identity, shifted and scaled by the noise level."""

    def __init__(self, before: int, after: int, embedded: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, before), nn.GroupNorm(4, after)
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.level = nn.Linear(embedded, 2 * after)
        self.beside = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Return (B, after, H, W)."""
        scale, shift = self.level(level)[:, :, None, None].chunk(2, 1)
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        out: Tensor = self.beside(x) + h
        return out


class Denoiser(nn.Module):
    """Images (B, C, H, W) down to a quarter of their size and up again, with what was lost beside it."""

    def __init__(self, shape: Sequence[int], classes: int, width: int, prior: Prior) -> None:
        super().__init__()
        self.shape, channels = tuple(shape), shape[0]
        self.wiener = Wiener(prior)
        self.named = nn.Embedding(classes + 1, 4 * width)  # the last: not known
        self.embed = nn.Sequential(nn.Linear(16, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width), nn.SiLU())
        wide = (width, 2 * width, 2 * width)
        self.first = nn.Conv2d(3 * channels, width, 3, padding=1)
        self.down = nn.ModuleList(Block(a, b, 4 * width) for a, b in zip((width, *wide[:2]), wide, strict=True))
        self.up = nn.ModuleList(
            Block(a + b, c, 4 * width) for a, b, c in ((wide[2], wide[1], wide[1]), (wide[1], wide[0], wide[0]))
        )
        self.last = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the Wiener filter makes of flat images x (B, d) with noise of sigma (B,), and what to add.

        ``classes`` (B,) are below zero where they are not known.
        """
        classes = torch.full_like(sigma, -1).long() if classes.ndim > 1 or classes.is_floating_point() else classes
        base, error = self.wiener(x, sigma), self.wiener.error(sigma)
        mean, spread = self.wiener.mean, self.wiener.spread
        waves = sigma.log()[:, None] / 4 * torch.arange(1, 9, device=x.device)
        level = self.embed(torch.cat([waves.sin(), waves.cos()], 1))
        level = level + self.named(torch.where(classes < 0, self.named.num_embeddings - 1, classes))
        given = [(x - mean) / (sigma.square() + spread**2).sqrt()[:, None], (base - mean) / spread, mean.expand_as(x)]
        h = self.first(torch.cat([part.reshape(-1, *self.shape) for part in given], 1))
        kept = []
        for i, block in enumerate(self.down):
            h = block(h if i == 0 else F.avg_pool2d(h, 2, ceil_mode=True), level)
            kept.append(h)
        for block, beside in zip(self.up, (kept[1], kept[0]), strict=True):
            h = block(torch.cat([F.interpolate(h, size=beside.shape[-2:]), beside], 1), level)
        return base, error[:, None] * self.last(F.silu(h)).flatten(1)


class Wiener(nn.Module):
    """The posterior mean of Gaussian images with white noise."""

    def __init__(self, prior: Prior) -> None:
        super().__init__()
        self.mean, self.basis, self.variances = (t.float() for t in (prior.mean, prior.basis, prior.variances))
        self.ridge = prior.ridge
        self.beyond = len(self.mean) - len(self.variances)  # directions of ridge alone
        self.spread = float((self.variances.sum() + self.beyond * self.ridge) / len(self.mean)) ** 0.5

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        """Return the mean of the images (B, d) behind x with noise of sigma (B,)."""
        s = sigma.square()[:, None]
        inside, outside = self.variances / (self.variances + s), self.ridge / (self.ridge + s)
        away = x - self.mean
        return self.mean + outside * away + ((away @ self.basis) * (inside - outside)) @ self.basis.T

    def error(self, sigma: Tensor) -> Tensor:
        """Return its root mean square error (B,)."""
        s = sigma.square()[:, None]
        inside = (self.variances * s / (self.variances + s)).sum(1)
        return ((inside + self.beyond * self.ridge * s[:, 0] / (self.ridge + s[:, 0])) / len(self.mean)).sqrt()


@dataclass(frozen=True)
class TrainedDenoiser:
    """A denoiser, and what is known of it at each noise level that it is used at, from images that were held out."""

    network: Denoiser
    held: Batch  # flat images (M, d) that were held out
    sigmas: list[float]  # noise levels, falling
    shares: list[float]  # of what the network adds to the Wiener filter, that is taken
    errors: list[float]  # squared, in units of the Wiener filter's
    late: bool  # the time was over before

    def clean(self, x: Tensor, classes: Tensor, level: int) -> Tensor:
        """Return the mean of the images behind x (..., d) at one of the noise levels."""
        flat, found = x.reshape(-1, x.shape[-1]).float(), []
        for part, names in zip(flat.split(TOGETHER), classes.flatten().split(TOGETHER), strict=True):
            with torch.no_grad():
                base, more = self.network(part, part.new_full((len(part),), self.sigmas[level]), names)
            found.append(base + self.shares[level] * more)
        return torch.cat(found).reshape(x.shape).to(x)


def train(
    public: Batch, classes: int, prior: Prior, width: int, steps: int, levels: Sequence[float]
) -> TrainedDenoiser:
    """Return a denoiser of public images (M, C, H, W), its weights averaged; levels are in units of their spread."""
    rng, device = Seeds()("denoiser"), public.inputs.device
    order = torch.randperm(len(public), generator=rng).to(device)
    images, labels = public.inputs[order].float(), public.labels[order]
    count = min(MOST_HELD_OUT, len(images) // HELD_OUT)
    held, known = Batch(images[:count].flatten(1), labels[:count]), Batch(images[count:], labels[count:])
    with torch.random.fork_rng([device] if images.is_cuda else []):
        torch.manual_seed(int(torch.randint(2**62, (1,), generator=rng)))
        net = Denoiser(images.shape[1:], classes, width, prior).to(device)
    sigmas = [level * net.wiener.spread for level in levels]
    averaged = copy.deepcopy(net).eval().requires_grad_(False)
    optimiser = torch.optim.Adam(net.parameters(), LR, fused=True)
    best, late = (
        TrainedDenoiser(copy.deepcopy(averaged), held, sigmas, [0.0] * len(sigmas), [1.0] * len(sigmas), False),
        False,
    )
    pace.step(0, steps)
    for done in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = LR * min(1.0, done / WARM) * (0.5 + 0.5 * math.cos(math.pi * done / (steps + 1)))
        optimiser.zero_grad()
        with torch.enable_grad():
            _loss(net, known, sigmas, rng).backward()
        optimiser.step()
        with torch.no_grad():
            kept = min(AVERAGED, 1 - 1 / (1 + done / 10))
            torch._foreach_lerp_(list(averaged.parameters()), list(net.parameters()), 1 - kept)
        late = pace.step(done, steps) and done < steps
        if done * LOOKS // steps > (done - 1) * LOOKS // steps or late:
            shares, errors = zip(*(_judged(averaged, held, sigma) for sigma in sigmas), strict=True)
            if sum(errors) < sum(best.errors):
                best = TrainedDenoiser(copy.deepcopy(averaged), held, sigmas, list(shares), list(errors), False)
        if late:
            break
    return replace(best, late=late)


def _loss(net: Denoiser, known: Batch, sigmas: list[float], rng: Generator) -> Tensor:
    """Return the squared error on some images, moved by at most a pixel, in units of the Wiener filter's."""
    chosen = torch.randint(len(known), (BATCH,), generator=rng).to(known.labels.device)
    down, right = (torch.randint(3, (2,), generator=rng) - 1).tolist()
    x, names = known.inputs[chosen].roll((down, right), (2, 3)).flatten(1), known.labels[chosen]
    names = (
        names if names.ndim > 1 else torch.where((torch.rand(BATCH, generator=rng) < UNNAMED).to(x.device), -1, names)
    )
    low, high = math.log(sigmas[-1]), math.log(sigmas[0])
    sigma = (low + (high - low) * torch.rand(BATCH, generator=rng)).exp().to(x)
    noise = torch.randn(x.shape, generator=rng).to(x)
    base, more = net(x + sigma[:, None] * noise, sigma, names)
    loss: Tensor = ((base + more - x).square().mean(1) / net.wiener.error(sigma).square()).mean()
    return loss


def _judged(net: Denoiser, held: Batch, sigma: float) -> tuple[float, float]:
    """Return the share of what the network adds that errs least on images that were held out, and the error left."""
    left = added = together = 0.0
    rng, x = Seeds()("held out"), held.inputs
    for _ in range(TRIED):
        noise = torch.randn(x.shape, generator=rng).to(x)
        with torch.no_grad():
            base, more = net(x + sigma * noise, x.new_full((len(x),), sigma), held.labels)
        missing = x - base
        left, added = left + float(missing.square().sum()), added + float(more.square().sum())
        together += float((missing * more).sum())
    share = min(1.0, max(0.0, together / added)) if added > 0 else 0.0
    return share, (left - 2 * share * together + share**2 * added) / left if left > 0 else 1.0
