"""A defence of a user's own, whose code lies in the folder of the command."""

import runpy
from dataclasses import dataclass
from typing import Any

from torch import Generator, nn

from gradveil import DEFENSES, Batch, Countermeasure, Defense, Update, countermeasures


@DEFENSES.register("mine")
@dataclass(frozen=True)
class Mine(Defense):
    """Do what own.py says, to a batch or to an update."""

    at: str = "on_update"

    def _act(self, name: str, given: Any) -> Any:
        return runpy.run_path("own.py")["act"](given) if name == self.at else given

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (countermeasures.plain(),)

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return self._act("on_batch", batch)

    def on_update(self, update: Update, rng: Generator) -> Update:
        return self._act("on_update", update)
