"""Noise of rank one."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("A matrix less its largest singular part is nearly free of it.", "noise of few numbers", "whiten")


@DEFENSES.register("low_rank_noise")
@dataclass(frozen=True)
class LowRankNoise(Defense):
    """Add an outer product of two Gaussian vectors to each matrix; on a bias that is noise of the usual kind."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            rows, columns = (torch.randn(n, generator=rng).to(g) for n in (len(g), g[0].numel()))
            return g + 5.0 * torch.outer(rows, columns).view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)
