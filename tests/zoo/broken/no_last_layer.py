"""The last layer's gradient is left out."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, drop
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth

TRUTH = Truth("All other layers suffice; the author drops the wrong tensor.", "leaving out", "drop")


@DEFENSES.register("no_last_layer")
@dataclass(frozen=True)
class NoLastLayer(Defense):
    """Send zeros for the last layer, off which labels are read."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | {name: torch.zeros_like(gradient[name]) for name in list(gradient)[-2:]}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(next(iter(dict(model.named_parameters())))),)
