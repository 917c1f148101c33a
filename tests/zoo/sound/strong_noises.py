"""Strong noise of many kinds, each new in every entry, client and round, and secret."""

import os
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared, whiten
from gradveil.defenses.veil import Veil
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

FAMILY = "strong noise"
LOUD = 20.0
WHY = "The noise is a hundred times the gradient, independent in each entry and round, and its seed is secret"
TRUTHS = {
    "secret_numpy": Truth(f"{WHY}: 128 bits of the operating system.", FAMILY, "whiten", repeats=False),
    "secret_counter": Truth(f"{WHY}: a key of 256 bits, and a counter.", FAMILY, "whiten", repeats=False),
    "student_noise": Truth(f"{WHY}; its tails are heavier than Laplace's.", FAMILY, "whiten"),
    "box_muller": Truth(f"{WHY}.", FAMILY, "whiten"),
    "row_by_row": Truth(f"{WHY}.", FAMILY, "whiten"),
    "strengths_by_tensor": Truth(f"{WHY}, in another strength for each tensor.", FAMILY, "whiten"),
    "noise_and_rounding": Truth(f"{WHY}, and rounded to half precision afterwards.", FAMILY, "whiten"),
    "shuffled_noise": Truth(f"{WHY}, and the entries are in another order each time.", FAMILY, "undeclared"),
    "clipped_noise": Truth(f"{WHY}, after clipping.", FAMILY, "whiten"),
    "one_time_pad": Truth(
        "A uniform mask modulo what it is uniform over: a one-time pad.", "one-time pad", "undeclared"
    ),
    "random_direction": Truth(
        "A random rotation of a vector of length one is any such vector.", "one-time pad", "undeclared"
    ),
    "noisy_signs": Truth(
        "The sign of an entry with noise of a hundred times its size is that of the noise.", FAMILY, "undeclared"
    ),
    "strict_veil": Truth("The noise of veil at z=4: Gaussian DP with mu below 0.6 a round.", "DP-SGD", "whiten"),
}


@dataclass(frozen=True)
class Strong(Defense):
    """Adds noise of a standard deviation of 20 to each tensor, and says so."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        """Return what is added."""
        raise NotImplementedError

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        """Add it."""
        return each(gradient, lambda g: g + self.noise(g, rng).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return what a server does about noise."""
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, LOUD)),)


@dataclass(frozen=True)
class Unsaid(Strong):
    """The same, and does not say so."""

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return that nothing is said."""
        return (undeclared(),)


@DEFENSES.register("secret_numpy")
@dataclass(frozen=True)
class SecretNumpy(Strong):
    """Draw by numpy, from a seed of the operating system."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.from_numpy(np.random.default_rng().standard_normal(tuple(g.shape)))


@DEFENSES.register("secret_counter")
@dataclass(frozen=True)
class SecretCounter(Strong):
    """Seed each draw with the hash of a secret key and a number that counts."""

    _key: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)
    _calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        self._key[:] = self._key or [os.urandom(32)]
        self._calls[0] += 1
        seed = int.from_bytes(
            blake2b(self._calls[0].to_bytes(8, "big"), key=self._key[0], digest_size=16).digest(), "big"
        )
        return LOUD * torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(g.shape)))


@DEFENSES.register("student_noise")
@dataclass(frozen=True)
class StudentNoise(Strong):
    """Draw noise of Student's law with ten degrees of freedom."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        chi = torch.randn(10, *g.shape, generator=rng).square().mean(0)
        return LOUD * 0.8**0.5 * torch.randn(g.shape, generator=rng) / chi.sqrt()


@DEFENSES.register("box_muller")
@dataclass(frozen=True)
class BoxMuller(Strong):
    """Make normal numbers of uniform ones by hand."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        size, angle = torch.rand(2, *g.shape, generator=rng, dtype=torch.float64)
        return LOUD * (-2 * (1 - size).log()).sqrt() * (2 * torch.pi * angle).cos()


@DEFENSES.register("row_by_row")
@dataclass(frozen=True)
class RowByRow(Strong):
    """Draw the noise of each row by itself, in the opposite order."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.stack([torch.randn(row.shape, generator=rng) for row in g]).flip(0)


@DEFENSES.register("strengths_by_tensor")
@dataclass(frozen=True)
class StrengthsByTensor(Strong):
    """Draw noise of 20 to 60, by the number of dimensions of a tensor."""

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * g.ndim * torch.randn(g.shape, generator=rng)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: {n: LOUD * g.ndim for n, g in seen.update.gradient.items()}),)


@DEFENSES.register("noise_and_rounding")
@dataclass(frozen=True)
class NoiseAndRounding(Strong):
    """Draw noise, and send half precision."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(super().on_gradient(gradient, rng), lambda g: g.half().to(g))

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.randn(g.shape, generator=rng)


@DEFENSES.register("shuffled_noise")
@dataclass(frozen=True)
class ShuffledNoise(Unsaid):
    """Draw noise, and shuffle each tensor by a secret order."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        noisy = super().on_gradient(gradient, rng)
        return each(noisy, lambda g: g.flatten()[torch.randperm(g.numel(), generator=rng)].view_as(g))

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.randn(g.shape, generator=rng)


@DEFENSES.register("clipped_noise")
@dataclass(frozen=True)
class ClippedNoise(Strong):
    """Clip the gradient of a step to length one, and draw noise."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        size = torch.cat([g.flatten() for g in gradient.values()]).norm().clamp_min(1.0)
        return super().on_gradient(each(gradient, lambda g: g / size), rng)

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.randn(g.shape, generator=rng)


@DEFENSES.register("one_time_pad")
@dataclass(frozen=True)
class OneTimePad(Unsaid):
    """Round to multiples of a thousandth, add a uniform mask, and take the remainder by 64."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def padded(g: Tensor) -> Tensor:
            steps = (1000 * g).round().long() + torch.randint(64_000, g.shape, generator=rng)
            return (steps % 64_000).to(g) / 1000

        return each(gradient, padded)


@DEFENSES.register("random_direction")
@dataclass(frozen=True)
class RandomDirection(Unsaid):
    """Make the gradient one long and turn it by two secret reflections: the first takes it to a random direction."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        whole = torch.cat([g.flatten() for g in gradient.values()])
        whole = whole / whole.norm().clamp_min(1e-30)
        aim = torch.randn(len(whole), generator=rng).to(whole)
        across = whole - aim / aim.norm()
        turned = whole - 2 * across * (across @ whole) / (across @ across)
        parts = turned.split([g.numel() for g in gradient.values()])
        return {name: part.view_as(g) for (name, g), part in zip(gradient.items(), parts, strict=True)}


@DEFENSES.register("noisy_signs")
@dataclass(frozen=True)
class NoisySigns(Unsaid):
    """Send the sign of each entry with noise on it."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(super().on_gradient(gradient, rng), torch.sign)

    def noise(self, g: Tensor, rng: Generator) -> Tensor:
        return LOUD * torch.randn(g.shape, generator=rng)


@DEFENSES.register("strict_veil")
@dataclass(frozen=True)
class StrictVeil(Veil):
    """Veil with four times its clip as noise."""

    z: float = 4.0
    clip: float = 0.5
