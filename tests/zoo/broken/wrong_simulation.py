"""A fixed permutation, with a simulation of another one declared."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, simulate
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The simulation that is declared is not of this defence.", "false declaration", "simulate")


@DEFENSES.register("wrong_simulation")
@dataclass(frozen=True)
class WrongSimulation(Defense):
    """Shuffle the entries of each tensor, always in the same way."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return _shuffled(gradient, 1)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (simulate(lambda gradient: _shuffled(gradient, 2), "Shuffles its own trial gradients in the same way."),)


def _shuffled(gradient: Params, seed: int) -> Params:
    own = Generator().manual_seed(seed)
    return each(gradient, lambda g: g.flatten()[torch.randperm(g.numel(), generator=own).to(g.device)].view_as(g))
