"""The entries of each tensor in reverse order."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.base import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Whoever has the code turns the order back.", "another basis", "plain")


@DEFENSES.register("backwards")
@dataclass(frozen=True)
class Backwards(Defense):
    """Send the last entry first."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.flatten().flip(0).view_as(g))

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
