"""A fixed permutation of the entries."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The permutation stands in the code and is undone.", "another basis", "plain")


@DEFENSES.register("fixed_permutation")
@dataclass(frozen=True)
class FixedPermutation(Defense):
    """Shuffle the entries of each tensor, always in the same way."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            order = torch.randperm(g.numel(), generator=Generator().manual_seed(99)).to(g.device)
            return g.flatten()[order].view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
