"""Noise in the first step and none after it."""

from dataclasses import dataclass, field

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("From the second step on nothing is hidden.", "acts at times", "whiten", repeats=False)


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
