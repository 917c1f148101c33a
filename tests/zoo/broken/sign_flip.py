"""A random sign for the whole of each tensor."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("One bit for each tensor is all that is secret: a few dozen cases to try.", "scaling and signs", "plain")


@DEFENSES.register("sign_flip")
@dataclass(frozen=True)
class SignFlip(Defense):
    """Toss a coin for each tensor and turn its sign."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g if torch.rand((), generator=rng) < 0.5 else -g

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
