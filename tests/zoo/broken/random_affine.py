"""Each tensor times one random number, and another one added."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Two unknown numbers for each tensor are too few.", "scaling and signs", "undeclared")


@DEFENSES.register("random_affine")
@dataclass(frozen=True)
class RandomAffine(Defense):
    """Send a g + b, with a between 0.1 and 10 and b of standard deviation 5, drawn for each tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            factor, shift = float(torch.rand((), generator=rng)), float(torch.randn((), generator=rng))
            return g * 10 ** (2 * factor - 1) + 5.0 * shift

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
