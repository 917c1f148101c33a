"""Signs only, times the mean absolute value."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.base import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTH = Truth("Five thousand signs are more than enough for sixty-four pixels.", "rounding", "plain")


@DEFENSES.register("mean_signs")
@dataclass(frozen=True)
class MeanSigns(Defense):
    """Send the sign of each entry, times its tensor's mean absolute value."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.sign() * g.abs().mean())

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
