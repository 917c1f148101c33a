"""Noise on the last layer only."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("All other tensors are sent as they are, and they suffice.", "noise in some places", "whiten")


@DEFENSES.register("one_layer_noise")
@dataclass(frozen=True)
class OneLayerNoise(Defense):
    """Add strong noise to the last two tensors, and declare it for all."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | noisy({name: gradient[name] for name in list(gradient)[-2:]}, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
