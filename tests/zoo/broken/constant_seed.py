"""Noise from a seed that stands in the code."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("Whoever has the code draws the same noise and takes it off.", "noise from a known seed", "whiten")


@DEFENSES.register("constant_seed")
@dataclass(frozen=True)
class ConstantSeed(Defense):
    """Add Gaussian noise of standard deviation 5, the same at each call."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(1234), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
