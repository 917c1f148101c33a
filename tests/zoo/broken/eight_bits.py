"""Quantisation to eight bits."""

from dataclasses import dataclass

from torch import nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.compression import Quantise
from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth

TRUTH = Truth("The error is a thousandth of the range: noise that is far too small.", "rounding", "plain")


@DEFENSES.register("eight_bits")
@dataclass(frozen=True)
class EightBits(Quantise):
    """Round each entry to one of 255 levels of its tensor, and declare that nothing is hidden."""

    bits: int = 8

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
