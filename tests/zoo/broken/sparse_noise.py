"""Noise that leaves half of the entries as they are."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth(
    "Half of the entries are exact, and noise of 50 is easily told from a gradient of 0.1.", "false law", "whiten"
)


@DEFENSES.register("sparse_noise")
@dataclass(frozen=True)
class SparseNoise(Defense):
    """Add noise of standard deviation 50 to every other entry, at random: its variance is as declared."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            hit = torch.rand(g.shape, generator=rng) < 0.5
            return g + (50.0 * hit * torch.randn(g.shape, generator=rng)).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 50.0 * 0.5**0.5)),)
