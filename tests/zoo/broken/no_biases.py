"""The biases' gradients are left out."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth("It stops the division dW / db and nothing else.", "leaving out", "plain")


@DEFENSES.register("no_biases")
@dataclass(frozen=True)
class NoBiases(Defense):
    """Send zeros for tensors with one dimension."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {name: torch.zeros_like(g) if g.ndim == 1 else g for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
