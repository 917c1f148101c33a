"""Gaussian noise that is strong, and declared as it is."""

from dataclasses import dataclass

from gradveil.defenses.noise import Gaussian
from gradveil.protection.defense import DEFENSES
from zoo.keeper import Truth

TRUTH = Truth("The noise is a hundred times the gradient, new in each entry and round.", "strong noise", "whiten")


@DEFENSES.register("strong_gaussian")
@dataclass(frozen=True)
class StrongGaussian(Gaussian):
    """Gaussian noise of standard deviation 20."""

    scale: float = 20.0
