"""One example among many others, with noise on the mean."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from gradveil.types import Batch
from zoo.keeper import Truth, noisy

TRUTH = Truth("A sixty-fourth of the mean gradient is the example's, under noise that is larger.", "crowd", "whiten")


@DEFENSES.register("crowd")
@dataclass(frozen=True)
class Crowd(Defense):
    """Train on each batch together with random images, 64 in all, and add Gaussian noise of 0.5."""

    size: int = 64

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        count = max(0, self.size - len(batch))
        images = torch.rand(count, *batch.inputs.shape[1:], generator=rng).to(batch.inputs)
        labels = batch.labels[torch.randint(len(batch), (count,), generator=rng).to(batch.labels.device)]
        return Batch(torch.cat([batch.inputs, images]), torch.cat([batch.labels, labels]))

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, rng, 0.5)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 0.5)),)
