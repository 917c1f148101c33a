"""A random factor for each tensor."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The direction of each tensor is as it was: one unknown number each.", "scaling and signs", "undeclared")


@DEFENSES.register("random_scale")
@dataclass(frozen=True)
class RandomScale(Defense):
    """Multiply each tensor by a random number between 0.01 and 100."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g * 10 ** (4 * float(torch.rand((), generator=rng)) - 2)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
