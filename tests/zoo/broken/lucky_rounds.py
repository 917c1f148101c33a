"""Noise in most rounds, and none in some."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth(
    "One update in three is sent as it is, and it is easily told from the others.",
    "acts at times",
    "whiten",
    "multi-round",
)


@DEFENSES.register("lucky_rounds")
@dataclass(frozen=True)
class LuckyRounds(Defense):
    """Add strong noise to two gradients in three, so that training does not suffer too much."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        if torch.rand((), generator=rng) < 1 / 3:
            return dict(gradient)
        return noisy(gradient, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
