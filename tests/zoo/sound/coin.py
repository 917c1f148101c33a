"""One random bit is sent in place of the update."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Update
from zoo.keeper import Truth, each

TRUTH = Truth("The bit has nothing to do with the examples.", "nothing is sent", "plain")


@DEFENSES.register("coin")
@dataclass(frozen=True)
class Coin(Defense):
    """Send 0.1 in all entries, or -0.1."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        bit = 0.1 if torch.rand((), generator=rng) < 0.5 else -0.1
        return replace(update, gradient=each(update.gradient, lambda g: torch.full_like(g, bit)))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
