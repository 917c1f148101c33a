"""Noise for large batches only."""

from dataclasses import dataclass, replace

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Update
from zoo.keeper import Truth, noisy

TRUTH = Truth("The small batches, which leak most, are sent as they are.", "acts at times", "whiten")


@DEFENSES.register("large_batches_only")
@dataclass(frozen=True)
class LargeBatchesOnly(Defense):
    """Add strong noise to the updates of clients that have eight examples or more."""

    least: int = 8

    def on_update(self, update: Update, rng: Generator) -> Update:
        if update.num_examples < self.least:
            return update
        return replace(update, gradient=noisy(update.gradient, rng, 5.0))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
