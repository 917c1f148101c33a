"""The same number is added to all entries."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth(
    "Differences between entries are as they were: one unknown number is too few.", "noise of few numbers", "whiten"
)


@DEFENSES.register("same_noise")
@dataclass(frozen=True)
class SameNoise(Defense):
    """Draw one Gaussian number of standard deviation 5 and add it to every entry of every tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        shift = 5.0 * float(torch.randn((), generator=rng))
        return each(gradient, lambda g: g + shift)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
