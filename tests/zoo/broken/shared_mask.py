"""One mask on all tensors, so that it cancels between them."""

from dataclasses import dataclass

import torch
from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The difference of two tensors has no mask in it.", "mask sent along", "whiten")


@DEFENSES.register("shared_mask")
@dataclass(frozen=True)
class SharedMask(Defense):
    """Draw 300 random numbers of standard deviation 5 and add them to each tensor, over and over."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        share = 5.0 * torch.randn(300, generator=rng)
        return each(gradient, lambda g: g + share.repeat(-(-g.numel() // 300))[: g.numel()].view_as(g).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
