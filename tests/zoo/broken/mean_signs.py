"""Signs only, times the mean absolute value."""

from dataclasses import dataclass

from torch import nn

from gradveil.countermeasures import Countermeasure, plain
from gradveil.defenses.compression import Sign
from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth

TRUTH = Truth("Five thousand signs are more than enough for sixty-four pixels.", "rounding", "plain")


@DEFENSES.register("mean_signs")
@dataclass(frozen=True)
class MeanSigns(Sign):
    """Send the sign of each entry, times its tensor's mean absolute value, and declare that nothing is hidden."""

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
