"""Images are blurred."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth(
    "A blurred image still shows what it is of, and a known blur can be undone.", "known change of the input", "plain"
)


@DEFENSES.register("input_blur")
@dataclass(frozen=True)
class InputBlur(Defense):
    """Take the mean of each pixel and its eight neighbours."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return replace(batch, inputs=F.avg_pool2d(batch.inputs, 3, 1, 1))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
