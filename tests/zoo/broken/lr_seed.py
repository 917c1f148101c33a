"""Noise from a seed that is the learning rate."""

from dataclasses import dataclass, replace

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Update
from zoo.keeper import Truth, noisy

TRUTH = Truth("The server sets the learning rate, so it has the seed.", "noise from a known seed", "whiten")


@DEFENSES.register("lr_seed")
@dataclass(frozen=True)
class LearningRateSeed(Defense):
    """Add Gaussian noise whose seed changes with the schedule of the learning rate."""

    def on_update(self, update: Update, rng: Generator) -> Update:
        own = Generator().manual_seed(round(update.lr * 1e6))
        return replace(update, gradient=noisy(update.gradient, own, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
