"""Numbers of sixteen bits."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Eleven bits of each entry arrive.", "rounding", "undeclared")


@DEFENSES.register("half_precision")
@dataclass(frozen=True)
class HalfPrecision(Defense):
    """Send float16."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.half().to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
