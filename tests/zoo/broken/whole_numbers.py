"""Noise in whole multiples of a large number."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The remainder of a division by 16 is the gradient.", "false law", "whiten")


@DEFENSES.register("whole_numbers")
@dataclass(frozen=True)
class WholeNumbers(Defense):
    """Add 16 times a rounded Gaussian number to each entry, as one does before a masked sum."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g + 16.0 * (4 * torch.randn(g.shape, generator=rng)).round().to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 64.0)),)
