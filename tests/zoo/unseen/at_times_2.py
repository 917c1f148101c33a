"""Noise that is left out, or made up for, at times: the half kept apart."""

from dataclasses import dataclass, field

import torch
from torch import Generator

from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from gradveil.types import Batch
from zoo.keeper import Noised, Truth, each, flat, randn

ROUNDS, TIMES = "noise over rounds", "acts at times"
TRUTHS = {
    "running_difference": Truth(
        "Each round's noise is a draw less the one before: the mean of all has next to none.",
        ROUNDS,
        "whiten",
        "multi-round",
        repeats=False,
    ),
    "negated_later": Truth("The round after next takes the noise off.", ROUNDS, "whiten", "multi-round"),
    "fading_noise": Truth("The noise falls with the number of calls.", TIMES, "whiten"),
    "spared_by_bias": Truth("Where one entry of the last bias is negative, nothing is added.", TIMES, "whiten"),
    "small_gradients_spared": Truth("A gradient that is small is sent as it is.", TIMES, "whiten"),
    "dark_images_spared": Truth("Examples that are dark are sent as they are.", TIMES, "whiten"),
}


@DEFENSES.register("running_difference")
@dataclass(frozen=True)
class RunningDifference(Noised):
    """Add a draw and take the one before off, so that sums over rounds stay near."""

    _last: Params = field(default_factory=dict, init=False, repr=False, compare=False)

    def noise(self, gradient: Params, rng: Generator) -> Params:
        drawn = each(gradient, lambda g: randn(g, rng) / 2**0.5)
        before = {n: self._last.get(n, 2**0.5 * randn(g, rng) / 2**0.5) for n, g in gradient.items()}
        self._last.update(drawn)
        return {n: drawn[n] - before[n] for n in gradient}


@DEFENSES.register("negated_later")
@dataclass(frozen=True)
class NegatedLater(Noised):
    """Take noise off two rounds after it was added."""

    _owed: list[Params] = field(default_factory=list, init=False, repr=False, compare=False)
    _calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def noise(self, gradient: Params, rng: Generator) -> Params:
        self._calls[0] += 1
        if self._calls[0] % 4 in (3, 0):
            return each(self._owed.pop(0), torch.neg)
        drawn = each(gradient, lambda g: randn(g, rng))
        self._owed.append(drawn)
        return drawn


@DEFENSES.register("fading_noise")
@dataclass(frozen=True)
class FadingNoise(Noised):
    """Divide the noise by the square of the number of calls."""

    _calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def noise(self, gradient: Params, rng: Generator) -> Params:
        self._calls[0] += 1
        return each(gradient, lambda g: randn(g, rng) / max(1, self._calls[0] - 20) ** 2)


@DEFENSES.register("spared_by_bias")
@dataclass(frozen=True)
class SparedByBias(Noised):
    """Spare the examples of one class, which the gradient itself gives away."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        last = list(gradient.values())[-1].flatten()
        return each(gradient, torch.zeros_like if float(last[0]) < 0 else lambda g: randn(g, rng))


@DEFENSES.register("small_gradients_spared")
@dataclass(frozen=True)
class SmallGradientsSpared(Noised):
    """Spare gradients of a norm below 1.5."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        spared = float(flat(gradient).norm()) < 1.5
        return each(gradient, torch.zeros_like if spared else lambda g: randn(g, rng))


@DEFENSES.register("dark_images_spared")
@dataclass(frozen=True)
class DarkImagesSpared(Noised):
    """Spare examples whose mean is below 0.3."""

    _dark: list[bool] = field(default_factory=lambda: [False], init=False, repr=False, compare=False)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        self._dark[0] = float(batch.inputs.mean()) < 0.3
        return batch

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, torch.zeros_like if self._dark[0] else lambda g: randn(g, rng))
