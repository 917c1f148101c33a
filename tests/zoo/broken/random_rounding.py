"""Entries are rounded to three levels at random."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from gradveil.countermeasures import Countermeasure, undeclared
from gradveil.defenses.compression import Qsgd
from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth

TRUTH = Truth(
    "The mean is the gradient, and five thousand rounded entries still tell one image from others.",
    "rounding",
    "undeclared",
)


@DEFENSES.register("random_rounding")
@dataclass(frozen=True)
class RandomRounding(Qsgd):
    """Send each entry as its tensor's largest size with its sign, or as zero, so that the mean is right (TernGrad)."""

    levels: int = 1
    norm: Literal["l2", "max"] = "max"

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)
