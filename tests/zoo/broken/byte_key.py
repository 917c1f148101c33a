"""Signs masked by a key of one byte."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The server tries all 256 keys; and the sizes of the entries are in the open.", "small key", "undeclared")


@DEFENSES.register("byte_key")
@dataclass(frozen=True)
class ByteKey(Defense):
    """Turn the sign of half of the entries; which, a key of eight bits says: an exclusive or of the sign bits."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        own = Generator().manual_seed(int(torch.randint(256, (), generator=rng)))

        def change(g: Tensor) -> Tensor:
            return g * (2 * torch.randint(2, g.shape, generator=own) - 1).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
