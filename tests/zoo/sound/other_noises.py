"""Sound defences of an independent adversary: strong noise of other kinds."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil import DEFENSES, Countermeasure, countermeasures
from gradveil.tree import Params
from zoo.keeper import STD, Noised, Truth, each, flat, randn, split

LOUD = 4  # times the noise of broken ones
TRUTHS = {
    "whole_numbers_after": Truth(
        "Independent noise, and then whole numbers: what is done after noise takes nothing off it.",
        "strong noise",
        "whiten",
    ),
    "random_strengths": Truth("Independent noise, whose strength is drawn for each tensor.", "strong noise", "whiten"),
    "noise_alone": Truth("Noise, and no gradient.", "nothing is sent", "whiten"),
    "neighbours": Truth(
        "Noise that hangs together a little, and is loud in every direction.", "strong noise", "undeclared"
    ),
    "two_strengths": Truth(
        "Independent noise, twice as strong in half of the entries, others each time.", "strong noise", "whiten"
    ),
    "discrete_noise": Truth("Whole noise on a gradient that is rounded at random.", "strong noise", "whiten"),
}


@dataclass(frozen=True)
class Loud(Noised):
    """Declares its noise to be that much."""

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.whiten(lambda seen: dict.fromkeys(seen.update.gradient, LOUD * STD)),)


@DEFENSES.register("whole_numbers_after")
@dataclass(frozen=True)
class WholeNumbersAfter(Loud):
    """Noise, then a public grid."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: (g + LOUD * randn(g, rng)).round())


@DEFENSES.register("random_strengths")
@dataclass(frozen=True)
class RandomStrengths(Noised):
    """A random strength for each tensor, between one and two."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: LOUD * randn(g, rng) * (1 + torch.rand((), generator=rng)))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.whiten(lambda seen: dict.fromkeys(seen.update.gradient, LOUD * STD * (7 / 3) ** 0.5)),)


@DEFENSES.register("noise_alone")
@dataclass(frozen=True)
class NoiseAlone(Loud):
    """Noise alone."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: LOUD * randn(g, rng))


@DEFENSES.register("neighbours")
@dataclass(frozen=True)
class Neighbours(Noised):
    """Correlated noise, loud in every direction."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn = LOUD * randn(flat(gradient), rng)
        return split(drawn + 0.4 * drawn.roll(1), gradient)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.undeclared(),)


@DEFENSES.register("two_strengths")
@dataclass(frozen=True)
class TwoStrengths(Noised):
    """Each entry's noise is of strength one or two."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: LOUD * randn(g, rng) * (1 + torch.randint(0, 2, g.shape, generator=rng)))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.whiten(lambda seen: dict.fromkeys(seen.update.gradient, LOUD * STD * 2.5**0.5)),)


@DEFENSES.register("discrete_noise")
@dataclass(frozen=True)
class DiscreteNoise(Loud):
    """Random rounding to whole numbers, then whole noise."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(
            gradient, lambda g: (g + torch.rand(g.shape, generator=rng)).floor() + (LOUD * randn(g, rng)).round()
        )
