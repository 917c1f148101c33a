"""Images are mirrored at random, as for augmentation."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth(
    "One bit for each image: the server looks at it and at its mirror image.", "known change of the input", "plain"
)


@DEFENSES.register("mirrored_at_random")
@dataclass(frozen=True)
class MirroredAtRandom(Defense):
    """Toss a coin for each image and mirror it."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        turned = (torch.rand(len(batch), 1, 1, 1, generator=rng) < 0.5).to(batch.inputs.device)
        return replace(batch, inputs=torch.where(turned, batch.inputs.flip(-1), batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
