"""Images are mixed with a public one."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth("The public image is known: it is taken off again.", "known change of the input", "undeclared")


@DEFENSES.register("public_mixture")
@dataclass(frozen=True)
class PublicMixture(Defense):
    """Train on a third of the image and two thirds of a public picture: a chequered one."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        rows, columns = (torch.arange(n, device=batch.inputs.device) // 2 for n in batch.inputs.shape[-2:])
        public = ((rows[:, None] + columns) % 2).to(batch.inputs)
        return replace(batch, inputs=batch.inputs / 3 + 2 * public / 3)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
