"""Nothing is sent."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Update
from zoo.keeper import Truth, each

TRUTH = Truth("An update of zeros says nothing.", "nothing is sent", "plain")


@DEFENSES.register("silence")
@dataclass(frozen=True)
class Silence(Defense):
    """Send zeros."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        return replace(update, gradient=each(update.gradient, torch.zeros_like))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
