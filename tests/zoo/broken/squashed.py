"""Entries are squashed into a small range."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("A function of single entries that has an inverse hides nothing.", "scaling and signs", "plain")


@DEFENSES.register("squashed")
@dataclass(frozen=True)
class Squashed(Defense):
    """Send tanh(3 g) / 100."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: (3 * g).tanh() / 100)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
