"""Examples changed by a rule that the server has."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.types import Batch
from zoo.keeper import Truth

TRUTHS = {
    "input_blur": Truth(
        "A blurred image still shows what it is of, and a known blur can be undone.",
        "known change of the input",
        "plain",
    ),
    "input_fixed_noise": Truth(
        "The server rebuilds the noisy image and takes the noise off.", "known change of the input", "undeclared"
    ),
    "input_flip": Truth("The server turns them back.", "known change of the input", "plain"),
    "mirrored_at_random": Truth(
        "One bit for each image: the server looks at it and at its mirror image.", "known change of the input", "plain"
    ),
    "public_mixture": Truth(
        "The public image is known: it is taken off again.", "known change of the input", "undeclared"
    ),
}


@DEFENSES.register("input_blur")
@dataclass(frozen=True)
class InputBlur(Defense):
    """Take the mean of each pixel and its eight neighbours."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return replace(batch, inputs=F.avg_pool2d(batch.inputs, 3, 1, 1))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("input_fixed_noise")
@dataclass(frozen=True)
class InputFixedNoise(Defense):
    """Add the same Gaussian noise to each image before training."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        noise = torch.randn(batch.inputs.shape[1:], generator=Generator().manual_seed(3))
        return replace(batch, inputs=batch.inputs + noise.to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("input_flip")
@dataclass(frozen=True)
class InputFlip(Defense):
    """Flip each image in both directions and take its negative."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        return replace(batch, inputs=1.0 - batch.inputs.flip(-1, -2))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("mirrored_at_random")
@dataclass(frozen=True)
class MirroredAtRandom(Defense):
    """Toss a coin for each image and mirror it."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        turned = (torch.rand(len(batch), 1, 1, 1, generator=rng) < 0.5).to(batch.inputs.device)
        return replace(batch, inputs=torch.where(turned, batch.inputs.flip(-1), batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


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
