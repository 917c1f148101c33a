"""Noise on the images from a fixed seed."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTH = Truth("The server rebuilds the noisy image and takes the noise off.", "known change of the input", "undeclared")


@DEFENSES.register("input_fixed_noise")
@dataclass(frozen=True)
class InputFixedNoise(Defense):
    """Add the same Gaussian noise to each image before training."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        noise = torch.randn(batch.inputs.shape[1:], generator=Generator().manual_seed(3))
        return replace(batch, inputs=batch.inputs + noise.to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
