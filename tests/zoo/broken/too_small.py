"""Noise that is too small."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("The noise is a thousandth of the gradient; all else about it is honest.", "weak noise", "whiten")


@DEFENSES.register("too_small")
@dataclass(frozen=True)
class TooSmall(Defense):
    """Add Gaussian noise of standard deviation 0.0001."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, rng, 1e-4)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 1e-4)),)
