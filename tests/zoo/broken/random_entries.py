"""A random third of the entries is left out."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The others are exact, and a zero shows what was left out.", "leaving out", "plain")


@DEFENSES.register("random_entries")
@dataclass(frozen=True)
class RandomEntries(Defense):
    """Set a random third of the entries to zero, as dropout does."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (torch.rand(g.shape, generator=rng) > 1 / 3).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
