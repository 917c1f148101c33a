"""Noise that is declared a thousand times as large as it is."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth(
    "The server that believes the declaration gets nothing, and one that does not, all.", "false law", "whiten"
)


@DEFENSES.register("overstated_noise")
@dataclass(frozen=True)
class OverstatedNoise(Defense):
    """Add Gaussian noise of standard deviation 0.005 and call it 5."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, rng, 0.005)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
