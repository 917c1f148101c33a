"""Entries are rounded to three levels at random."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.defenses.base import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth(
    "The mean is the gradient, and five thousand rounded entries still tell one image from others.",
    "rounding",
    "undeclared",
)


@DEFENSES.register("random_rounding")
@dataclass(frozen=True)
class RandomRounding(Defense):
    """Send each entry as its tensor's largest size with its sign, or as zero, so that the mean is right (TernGrad)."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            most = g.abs().amax().clamp_min(1e-12)
            return most * g.sign() * (torch.rand(g.shape, generator=rng).to(g) < g.abs() / most)

        return each(gradient, change)

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
