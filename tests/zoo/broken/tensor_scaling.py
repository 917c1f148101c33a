"""A fixed factor for each tensor."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth("The factors stand in the code.", "scaling and signs", "plain")


@DEFENSES.register("tensor_scaling")
@dataclass(frozen=True)
class TensorScaling(Defense):
    """Multiply the tensors by 100, 0.01, 100, ... in turn."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {name: g * (0.01 if i % 2 else 100.0) for i, (name, g) in enumerate(gradient.items())}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
