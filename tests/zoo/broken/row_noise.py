"""Noise that is the same along each row."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("A row less its mean is free of it.", "noise of few numbers", "whiten")


@DEFENSES.register("row_noise")
@dataclass(frozen=True)
class RowNoise(Defense):
    """Draw one Gaussian number of standard deviation 5 for each row of each tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g + 5.0 * torch.randn(len(g), *[1] * (g.ndim - 1), generator=rng).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
