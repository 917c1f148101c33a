"""Images are turned upside down."""

from dataclasses import dataclass, replace

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth("The server turns them back.", "known change of the input", "plain")


@DEFENSES.register("input_flip")
@dataclass(frozen=True)
class InputFlip(Defense):
    """Flip each image in both directions and take its negative."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return replace(batch, inputs=1.0 - batch.inputs.flip(-1, -2))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
