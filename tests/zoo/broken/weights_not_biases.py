"""Noise on the weights and none on the biases."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth(
    "The biases' gradients are exact, and with what images look like they tell this one from others.",
    "noise in some places",
    "whiten",
)


@DEFENSES.register("weights_not_biases")
@dataclass(frozen=True)
class WeightsNotBiases(Defense):
    """Add noise of standard deviation 5 to tensors with two dimensions or more."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | noisy({name: g for name, g in gradient.items() if g.ndim > 1}, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
