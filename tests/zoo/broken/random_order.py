"""The entries of each tensor in a random order, another one each time."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth(
    "The values themselves are in the open: sorted, they are thousands of equations for 64 pixels.",
    "another basis",
    "plain",
)


@DEFENSES.register("random_order")
@dataclass(frozen=True)
class RandomOrder(Defense):
    """Shuffle the entries of each tensor by a secret permutation."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.flatten()[torch.randperm(g.numel(), generator=rng).to(g.device)].view_as(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
