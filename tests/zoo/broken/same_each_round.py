"""Noise that is drawn once and then used in every round."""

from dataclasses import dataclass, field

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth(
    "The difference of two rounds has no noise in it.",
    "noise over rounds",
    "whiten",
    tier="multi-round",
    repeats=False,
)


@DEFENSES.register("same_each_round")
@dataclass(frozen=True)
class SameEachRound(Defense):
    """Draw noise at the first step, and add it again at all others."""

    _drawn: Params = field(default_factory=dict, init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        for name, g in gradient.items():
            if name not in self._drawn or self._drawn[name].shape != g.shape:
                self._drawn[name] = 5.0 * torch.randn(g.shape, generator=rng)
        return {name: g + self._drawn[name].to(g) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
