"""Every entry is clipped to a small range."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Signs and small entries are left, and nothing is random.", "rounding", "whiten")


@DEFENSES.register("hard_clip")
@dataclass(frozen=True)
class HardClip(Defense):
    """Clip each entry to 0.02; the noise that is declared was forgotten."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.clamp(-0.02, 0.02))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 0.1)),)
