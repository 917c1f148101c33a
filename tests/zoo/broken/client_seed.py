"""Noise from a seed that is the client's number."""

from dataclasses import dataclass, replace

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Update
from zoo.keeper import Truth, noisy

TRUTH = Truth("The server knows which client it talks to.", "noise from a known seed", "undeclared")


@DEFENSES.register("client_seed")
@dataclass(frozen=True)
class ClientSeed(Defense):
    """Add Gaussian noise whose seed is the client's number and how many examples it has."""

    client: int = 7

    def on_update(self, update: Update, rng: Generator) -> Update:
        own = Generator().manual_seed(1000 * self.client + update.num_examples)
        return replace(update, gradient=noisy(update.gradient, own, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
