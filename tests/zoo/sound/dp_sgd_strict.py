"""DP-SGD as Opacus runs it, at epsilon 1."""

from dataclasses import dataclass

from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth, load

load("dp_sgd")
DpSgd = DEFENSES.get("dp_sgd")

TRUTH = Truth("Differential privacy at epsilon 1.", "DP-SGD", "whiten")


@DEFENSES.register("dp_sgd_strict")
@dataclass(frozen=True)
class DpSgdStrict(DpSgd):
    """The same with more noise."""

    epsilon: float = 1.0
