"""Laplace noise that is strong, and declared as it is."""

from dataclasses import dataclass
from typing import Literal

from gradveil.defenses.noise import Laplace
from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth

TRUTH = Truth("The noise is a hundred times the gradient, new in each entry and round.", "strong noise", "whiten")


@DEFENSES.register("strong_laplace")
@dataclass(frozen=True)
class StrongLaplace(Laplace):
    """Laplace noise of standard deviation 20, on the update."""

    scale: float = 20.0
    on: Literal["gradient", "update", "weights"] = "update"
