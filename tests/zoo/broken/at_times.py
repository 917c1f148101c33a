"""Noise that is left out, or made up for, at times."""

from dataclasses import dataclass, field, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from gradveil.types import Batch, Update
from zoo.keeper import Noised, Truth, each, noisy, randn

ROUNDS, TIMES = "noise over rounds", "acts at times"
TRUTHS = {
    "four_rounds": Truth("The sum of four rounds has no noise in it.", ROUNDS, "whiten", "multi-round"),
    "late_calls": Truth("From the fiftieth call on nothing is hidden.", TIMES, "whiten"),
    "spared_class": Truth("Examples of one class are sent as they are.", TIMES, "whiten"),
    "rare_rounds": Truth("One round in fifty is sent as it is.", TIMES, "whiten", "multi-round"),
    "first_step_only": Truth("From the second step on nothing is hidden.", "acts at times", "whiten", repeats=False),
    "large_batches_only": Truth("The small batches, which leak most, are sent as they are.", "acts at times", "whiten"),
    "lucky_rounds": Truth(
        "One update in three is sent as it is, and it is easily told from the others.",
        "acts at times",
        "whiten",
        "multi-round",
    ),
    "cancelling_noise": Truth(
        "The sum of two rounds has no noise in it: so that training does not suffer, nor does the server.",
        "noise over rounds",
        "whiten",
        tier="multi-round",
        repeats=False,
    ),
    "same_each_round": Truth(
        "The difference of two rounds has no noise in it.",
        "noise over rounds",
        "whiten",
        tier="multi-round",
        repeats=False,
    ),
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


@DEFENSES.register("first_step_only")
@dataclass(frozen=True)
class FirstStepOnly(Defense):
    """Add strong noise while the network is untrained, when leaks are said to be worst."""

    _steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        self._steps[0] += 1
        return noisy(gradient, rng, 5.0) if self._steps[0] == 1 else dict(gradient)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("large_batches_only")
@dataclass(frozen=True)
class LargeBatchesOnly(Defense):
    """Add strong noise to the updates of clients that have eight examples or more."""

    least: int = 8

    def on_update(self, update: Update, rng: Generator) -> Update:
        if update.num_examples < self.least:
            return update
        return replace(update, gradient=noisy(update.gradient, rng, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("lucky_rounds")
@dataclass(frozen=True)
class LuckyRounds(Defense):
    """Add strong noise to two gradients in three, so that training does not suffer too much."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        if torch.rand((), generator=rng) < 1 / 3:
            return dict(gradient)
        return noisy(gradient, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("cancelling_noise")
@dataclass(frozen=True)
class CancellingNoise(Defense):
    """Add noise in one step, and take the same off in the next."""

    _owed: Params = field(default_factory=dict, init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        sent = {}
        for name, g in gradient.items():
            owed = self._owed.pop(name, None)
            if owed is None or owed.shape != g.shape:
                noise = self._owed[name] = 5.0 * torch.randn(g.shape, generator=rng)
            else:
                noise = -owed
            sent[name] = g + noise.to(g)
        return sent

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("same_each_round")
@dataclass(frozen=True)
class SameEachRound(Defense):
    """Draw noise at the first step, and add it again at all others."""

    _drawn: Params = field(default_factory=dict, init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        for name, g in gradient.items():
            if name not in self._drawn or self._drawn[name].shape != g.shape:
                self._drawn[name] = 5.0 * torch.randn(g.shape, generator=rng)
        return {name: g + self._drawn[name].to(g) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
