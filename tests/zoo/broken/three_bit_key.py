"""Noise from one of eight seeds."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("The server tries all eight seeds.", "small key", "whiten")


@DEFENSES.register("three_bit_key")
@dataclass(frozen=True)
class ThreeBitKey(Defense):
    """Draw a key of three bits, and Gaussian noise of standard deviation 5 from it."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        key = int(torch.randint(8, (), generator=rng))
        return noisy(gradient, Generator().manual_seed(key), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
