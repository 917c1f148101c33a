"""Masks that the server knows, or is sent."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, undeclared, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each, noisy

TRUTHS = {
    "known_shift": Truth("The constant stands in the code.", "fixed mask", "undeclared"),
    "key_in_a_bias": Truth(
        "The server reads the key off the update and takes the mask off.", "mask sent along", "whiten"
    ),
    "shared_mask": Truth("The difference of two tensors has no mask in it.", "mask sent along", "whiten"),
}


@DEFENSES.register("known_shift")
@dataclass(frozen=True)
class KnownShift(Defense):
    """Add 3 to every entry."""

    shift: float = 3.0

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g + self.shift)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


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


@DEFENSES.register("shared_mask")
@dataclass(frozen=True)
class SharedMask(Defense):
    """Draw 300 random numbers of standard deviation 5 and add them to each tensor, over and over."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        share = 5.0 * torch.randn(300, generator=rng)
        return each(gradient, lambda g: g + share.repeat(-(-g.numel() // 300))[: g.numel()].view_as(g).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
