"""Clipping without noise."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params, flatten
from zoo.keeper import Truth, each

TRUTH = Truth("The direction is as it was: half of DP-SGD gives no privacy at all.", "scaling and signs", "whiten")


@DEFENSES.register("clipping_only")
@dataclass(frozen=True)
class ClippingOnly(Defense):
    """Clip to norm 0.1; the noise that is declared was forgotten."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        factor = (0.1 / flatten(gradient).norm()).clamp(max=1.0)
        return each(gradient, lambda g: g * factor)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 0.1)),)
