"""Noise around a mean that is large and known; what is random in it is small."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each, noisy

TRUTH = Truth("The mean stands in the code and is taken off; what is left is small.", "false law", "whiten")


@DEFENSES.register("known_mean")
@dataclass(frozen=True)
class KnownMean(Defense):
    """Add noise from N(5, 0.001²), whose root mean square is indeed 5."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(noisy(gradient, rng, 0.001), lambda g: g + 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
