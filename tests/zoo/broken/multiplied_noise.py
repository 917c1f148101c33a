"""Noise in proportion to each entry."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Small entries stay small, so that all of them together tell the image.", "false law", "whiten")


@DEFENSES.register("multiplied_noise")
@dataclass(frozen=True)
class MultipliedNoise(Defense):
    """Multiply each entry by a random number around 1 with standard deviation 0.5; declare noise of 1."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (1 + 0.5 * torch.randn(g.shape, generator=rng).to(g)))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 1.0)),)
