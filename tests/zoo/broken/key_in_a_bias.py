"""A mask whose key is sent along in the last bias."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("The server reads the key off the update and takes the mask off.", "mask sent along", "whiten")


@DEFENSES.register("key_in_a_bias")
@dataclass(frozen=True)
class KeyInABias(Defense):
    """Mask all tensors by noise from a random key of twenty bits, and send the key for an honest aggregator."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        key = int(torch.randint(2**20, (), generator=rng))
        sent = noisy(gradient, Generator().manual_seed(key), 5.0)
        last = list(gradient)[-1]
        return sent | {last: torch.full_like(gradient[last], float(key))}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
