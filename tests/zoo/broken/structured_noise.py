"""Noise that is loud in each entry and leaves combinations of entries alone."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, flat, randn, split

FAMILY = "noise with structure"
TRUTHS = {
    "twins": Truth("Two entries share each noise value: their difference is free of it.", FAMILY, "whiten"),
    "numpy_twins": Truth("The same, drawn by numpy, where the second entry has twice the value.", FAMILY, "whiten"),
    "quiet_subspace": Truth("The noise leaves 300 public directions alone.", FAMILY, "whiten"),
    "orthogonal_noise": Truth(
        "The inner product of what is sent with the true gradient is that of no noise.", FAMILY, "whiten"
    ),
    "weight_and_bias": Truth(
        "The noise of a bias is that of its weights, added up, with the sign turned.", FAMILY, "whiten"
    ),
    "smooth_noise": Truth("The noise is interpolated between half as many numbers.", FAMILY, "whiten"),
    "loud_entries": Truth("Seven entries in ten carry hardly any noise, and those are small.", FAMILY, "whiten"),
    "spiky_noise": Truth("The ninth power of a normal number: most entries carry next to none.", FAMILY, "whiten"),
    "fixed_length": Truth("What is sent is as far from the true gradient as from no other.", FAMILY, "whiten"),
    "fine_lattice": Truth("The noise is a multiple of 3: remainders are free of it.", FAMILY, "whiten"),
}


@DEFENSES.register("twins")
@dataclass(frozen=True)
class Twins(Noised):
    """Use each noise value for two entries of a tensor, one after the other."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def twice(g: Tensor) -> Tensor:
            half = STD * torch.randn(-(-g.numel() // 2), generator=rng)
            return half.repeat_interleave(2)[: g.numel()]

        return each(gradient, twice)


@DEFENSES.register("numpy_twins")
@dataclass(frozen=True)
class NumpyTwins(Noised):
    """Add a value to an entry of the first half, and twice that to one of the second."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn = np.random.default_rng(int(torch.randint(2**62, (), generator=rng)))
        size = flat(gradient).numel()
        half = drawn.normal(size=size // 2) * STD / 2.5**0.5
        rest = np.concatenate([half, 2 * half, drawn.normal(size=size % 2)])
        return split(torch.from_numpy(rest), gradient)


@cache
def _quiet(size: int, count: int = 300) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(size, count, generator=Generator().manual_seed(5)))[0]
    return basis


@DEFENSES.register("quiet_subspace")
@dataclass(frozen=True)
class QuietSubspace(Noised):
    """Keep the noise off the directions in which the network learns most, which are public."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn = STD * torch.randn(flat(gradient).numel(), generator=rng)
        basis = _quiet(len(drawn))
        return split(drawn - basis @ (basis.T @ drawn), gradient)


@DEFENSES.register("orthogonal_noise")
@dataclass(frozen=True)
class OrthogonalNoise(Noised):
    """Take the part along the gradient off the noise of each tensor, so that training does not suffer."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def across(g: Tensor) -> Tensor:
            drawn = randn(g, rng)
            return drawn - (drawn * g).sum() / g.square().sum().clamp_min(1e-30) * g

        return each(gradient, across)


@DEFENSES.register("weight_and_bias")
@dataclass(frozen=True)
class WeightAndBias(Noised):
    """Draw noise for the weights, and let that of a bias cancel it for an input of ones."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn: Params = {}
        for name, g in gradient.items():
            weight = drawn.get(name.replace("bias", "weight")) if name.endswith("bias") else None
            drawn[name] = randn(g, rng) if weight is None else -weight.reshape(len(weight), -1).sum(1)
        return drawn


@DEFENSES.register("smooth_noise")
@dataclass(frozen=True)
class SmoothNoise(Noised):
    """Interpolate the noise of a tensor, so that it is as smooth as gradients are."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def smooth(g: Tensor) -> Tensor:
            coarse = 1.3 * STD * torch.randn(1, 1, g.numel() // 2 + 1, generator=rng)
            return torch.nn.functional.interpolate(coarse, g.numel(), mode="linear", align_corners=True)

        return each(gradient, smooth)


@DEFENSES.register("loud_entries")
@dataclass(frozen=True)
class LoudEntries(Noised):
    """Add loud noise to three entries in ten, others each time, and a thousandth of it to the rest."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def mixed(g: Tensor) -> Tensor:
            loud = torch.rand(g.shape, generator=rng) < 0.3
            return randn(g, rng) * torch.where(loud, 0.3**-0.5, 1e-3)

        return each(gradient, mixed)


@DEFENSES.register("spiky_noise")
@dataclass(frozen=True)
class SpikyNoise(Noised):
    """Add noise of the declared variance with heavy tails."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        scale = (17 * 15 * 13 * 11 * 9 * 7 * 5 * 3) ** -0.5  # of the ninth power
        return each(gradient, lambda g: STD * scale * torch.randn(g.shape, generator=rng) ** 9)


@DEFENSES.register("fixed_length")
@dataclass(frozen=True)
class FixedLength(Noised):
    """Give the noise of each tensor the length that it has on average."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        def at_length(g: Tensor) -> Tensor:
            drawn = randn(g, rng)
            return STD * g.numel() ** 0.5 * drawn / drawn.norm()

        return each(gradient, at_length)


@DEFENSES.register("fine_lattice")
@dataclass(frozen=True)
class FineLattice(Noised):
    """Add noise that is a whole number of steps, so that it can be stored in few bytes."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: 3.0 * (20 * randn(g, rng) / 3.0).round())

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 20 * STD)),)
