"""Noise from a seed that is a hash of the weights."""

import zlib
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, drop
from gradveil.modules import LINEAR
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import flatten, parameters
from zoo.keeper import Truth

TRUTH = Truth(
    "The server sent the weights, so it has their hash and draws the same noise; it is told to drop one layer only.",
    "noise from a known seed",
    "drop",
)


@DEFENSES.register("weights_seed")
@dataclass(frozen=True)
class WeightsSeed(Defense):
    """Add noise to the input of every layer in its weight gradient; another in each round, since weights move."""

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, module in model.named_modules() if isinstance(module, LINEAR))

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        weights = flatten(parameters(model)).detach().cpu().numpy().tobytes()
        own = Generator().manual_seed(zlib.crc32(weights + layer.encode()))
        return r + 3.0 * torch.randn(r.shape[1:], generator=own).to(r)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(f"{self.layers(model)[-1]}.weight"),)
