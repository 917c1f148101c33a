"""A random sign for each entry."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth(
    "The sizes of all entries are in the open: thousands of equations for 64 pixels.", "scaling and signs", "undeclared"
)


@DEFENSES.register("random_signs")
@dataclass(frozen=True)
class RandomSigns(Defense):
    """Toss a coin for each entry and turn its sign."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (2 * torch.randint(2, g.shape, generator=rng) - 1).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
