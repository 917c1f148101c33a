"""Noise that the next round takes off again."""

from dataclasses import dataclass, field

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth(
    "The sum of two rounds has no noise in it: so that training does not suffer, nor does the server.",
    "noise over rounds",
    "whiten",
    tier="multi-round",
    repeats=False,
)


@DEFENSES.register("cancelling_noise")
@dataclass(frozen=True)
class CancellingNoise(Defense):
    """Add noise in one step, and take the same off in the next."""

    _owed: Params = field(default_factory=dict, init=False, repr=False, compare=False)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        sent = {}
        for name, g in gradient.items():
            owed = self._owed.pop(name, None)
            if owed is None or owed.shape != g.shape:
                noise = self._owed[name] = 5.0 * torch.randn(g.shape, generator=rng)
            else:
                noise = -owed
            sent[name] = g + noise.to(g)
        return sent

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
