"""Noise from Python's random, seeded with the time in seconds."""

import random
import time
from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth(
    "The update arrives within a minute, so that sixty seeds are all there are.",
    "noise from a known seed",
    "whiten",
    repeats=False,
)


@DEFENSES.register("clock_seed")
@dataclass(frozen=True)
class ClockSeed(Defense):
    """Add Gaussian noise whose seed the clock gives."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        seed = random.Random(int(time.time())).getrandbits(60)
        return noisy(gradient, Generator().manual_seed(seed), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
