"""Noise from a seed that is the number of the round."""

from dataclasses import dataclass, field

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth(
    "The server counts the rounds as well as the client does, and draws the same noise.",
    "noise from a known seed",
    "plain",
    repeats=False,
)


@DEFENSES.register("round_seed")
@dataclass(frozen=True)
class RoundSeed(Defense):
    """Add Gaussian noise whose seed counts the steps taken: other noise at each call."""

    _steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        self._steps[0] += 1
        return noisy(gradient, Generator().manual_seed(self._steps[0]), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
