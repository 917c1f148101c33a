"""Quantisation to eight bits."""

from dataclasses import dataclass

from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.base import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("The error is a thousandth of the range: noise that is far too small.", "rounding", "plain")


@DEFENSES.register("eight_bits")
@dataclass(frozen=True)
class EightBits(Defense):
    """Round each entry to one of 255 levels of its tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            level = g.abs().amax().clamp_min(1e-12) / 127
            return (g / level).round() * level

        return each(gradient, change)

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
