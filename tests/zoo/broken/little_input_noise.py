"""A little noise on the image."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth("The noisy image is recovered, and it shows what it is of.", "weak noise", "undeclared")


@DEFENSES.register("little_input_noise")
@dataclass(frozen=True)
class LittleInputNoise(Defense):
    """Add Gaussian noise of standard deviation 0.1 to each image."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        noise = torch.randn(batch.inputs.shape, generator=rng)
        return replace(batch, inputs=batch.inputs + 0.1 * noise.to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
