"""A fixed rotation of each tensor."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("A known rotation is undone by its transpose.", "another basis", "plain")


@DEFENSES.register("fixed_rotation")
@dataclass(frozen=True)
class FixedRotation(Defense):
    """Turn each tensor by eight reflections at planes that are always the same."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            flat, own = g.flatten(), Generator().manual_seed(5)
            for _ in range(8):
                normal = torch.randn(g.numel(), generator=own).to(g)
                flat = flat - 2 * normal * (normal @ flat) / (normal @ normal)
            return flat.view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
