"""Noise that is left out, or made up for, at times."""

from dataclasses import dataclass, field

import torch
from torch import Generator

from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params
from gradveil.types import Batch
from zoo.keeper import Noised, Truth, each, randn

ROUNDS, TIMES = "noise over rounds", "acts at times"
TRUTHS = {
    "four_rounds": Truth("The sum of four rounds has no noise in it.", ROUNDS, "whiten", "multi-round"),
    "late_calls": Truth("From the fiftieth call on nothing is hidden.", TIMES, "whiten"),
    "spared_class": Truth("Examples of one class are sent as they are.", TIMES, "whiten"),
    "rare_rounds": Truth("One round in fifty is sent as it is.", TIMES, "whiten", "multi-round"),
}


@DEFENSES.register("four_rounds")
@dataclass(frozen=True)
class FourRounds(Noised):
    """Add noise in three rounds, and take their sum off in the fourth."""

    _sums: list[Params] = field(default_factory=list, init=False, repr=False, compare=False)

    def noise(self, gradient: Params, rng: Generator) -> Params:
        if len(self._sums) == 3:
            drawn = {n: -sum((one[n] for one in self._sums), torch.zeros(())) for n in gradient}
            self._sums.clear()
            return drawn
        drawn = each(gradient, lambda g: randn(g, rng))
        self._sums.append(drawn)
        return drawn


@DEFENSES.register("late_calls")
@dataclass(frozen=True)
class LateCalls(Noised):
    """Add noise while the network is young."""

    _calls: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def noise(self, gradient: Params, rng: Generator) -> Params:
        self._calls[0] += 1
        return each(gradient, (lambda g: randn(g, rng)) if self._calls[0] < 50 else torch.zeros_like)


@DEFENSES.register("spared_class")
@dataclass(frozen=True)
class SparedClass(Noised):
    """Spare the class that the network learns worst."""

    _label: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        self._label[0] = int(batch.labels.flatten()[0])
        return batch

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, torch.zeros_like if self._label[0] == 3 else lambda g: randn(g, rng))


@DEFENSES.register("rare_rounds")
@dataclass(frozen=True)
class RareRounds(Noised):
    """Leave the noise out of one round in fifty."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        silent = float(torch.rand((), generator=rng)) < 0.02
        return each(gradient, torch.zeros_like if silent else lambda g: randn(g, rng))
