"""Noise from a fixed seed, and a countermeasure that bears a known name and does nothing."""

from dataclasses import dataclass

from torch import Generator, nn

from gradveil.countermeasures import Countermeasure
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, noisy

TRUTH = Truth("What is called a simulation of the defence changes nothing.", "false declaration", "simulate")


@DEFENSES.register("borrowed_name")
@dataclass(frozen=True)
class BorrowedName(Defense):
    """Add Gaussian noise of standard deviation 5, the same at each call."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(17), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (Countermeasure("simulate", "Runs the defence on the server's own trial gradients.", lambda seen: seen),)
