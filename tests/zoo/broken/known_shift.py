"""A constant is added to every entry."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The constant stands in the code.", "fixed mask", "undeclared")


@DEFENSES.register("known_shift")
@dataclass(frozen=True)
class KnownShift(Defense):
    """Add 3 to every entry."""

    shift: float = 3.0

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g + self.shift)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
