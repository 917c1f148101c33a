"""Noise on the image from a seed that is its label."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth("The server reads the label off the update, and there are ten of them.", "small key", "undeclared")


@DEFENSES.register("label_seed")
@dataclass(frozen=True)
class LabelSeed(Defense):
    """Add Gaussian noise of standard deviation 1 to each image, drawn from its label."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        shape = batch.inputs.shape[1:]
        noise = [torch.randn(shape, generator=Generator().manual_seed(int(label))) for label in batch.labels]
        return replace(batch, inputs=batch.inputs + torch.stack(noise).to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
