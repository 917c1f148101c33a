"""What is declared is not what is done."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, simulate, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each, noisy

TRUTHS = {
    "borrowed_name": Truth(
        "What is called a simulation of the defence changes nothing.", "false declaration", "simulate"
    ),
    "wrong_simulation": Truth(
        "The simulation that is declared is not of this defence.", "false declaration", "simulate"
    ),
    "known_mean": Truth("The mean stands in the code and is taken off; what is left is small.", "false law", "whiten"),
    "multiplied_noise": Truth(
        "Small entries stay small, so that all of them together tell the image.", "false law", "whiten"
    ),
    "overstated_noise": Truth(
        "The server that believes the declaration gets nothing, and one that does not, all.", "false law", "whiten"
    ),
    "sparse_noise": Truth(
        "Half of the entries are exact, and noise of 50 is easily told from a gradient of 0.1.", "false law", "whiten"
    ),
    "whole_numbers": Truth("The remainder of a division by 16 is the gradient.", "false law", "whiten"),
}


@DEFENSES.register("borrowed_name")
@dataclass(frozen=True)
class BorrowedName(Defense):
    """Add Gaussian noise of standard deviation 5, the same at each call."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, Generator().manual_seed(17), 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (Countermeasure("simulate", "Runs the defence on the server's own trial gradients.", lambda seen: seen),)


@DEFENSES.register("wrong_simulation")
@dataclass(frozen=True)
class WrongSimulation(Defense):
    """Shuffle the entries of each tensor, always in the same way."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return _shuffled(gradient, 1)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (simulate(lambda gradient: _shuffled(gradient, 2), "Shuffles its own trial gradients in the same way."),)


def _shuffled(gradient: Params, seed: int) -> Params:
    own = Generator().manual_seed(seed)
    return each(gradient, lambda g: g.flatten()[torch.randperm(g.numel(), generator=own).to(g.device)].view_as(g))


@DEFENSES.register("known_mean")
@dataclass(frozen=True)
class KnownMean(Defense):
    """Add noise from N(5, 0.001²), whose root mean square is indeed 5."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(noisy(gradient, rng, 0.001), lambda g: g + 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("multiplied_noise")
@dataclass(frozen=True)
class MultipliedNoise(Defense):
    """Multiply each entry by a random number around 1 with standard deviation 0.5; declare noise of 1."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (1 + 0.5 * torch.randn(g.shape, generator=rng).to(g)))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 1.0)),)


@DEFENSES.register("overstated_noise")
@dataclass(frozen=True)
class OverstatedNoise(Defense):
    """Add Gaussian noise of standard deviation 0.005 and call it 5."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, rng, 0.005)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("sparse_noise")
@dataclass(frozen=True)
class SparseNoise(Defense):
    """Add noise of standard deviation 50 to every other entry, at random: its variance is as declared."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            hit = torch.rand(g.shape, generator=rng) < 0.5
            return g + (50.0 * hit * torch.randn(g.shape, generator=rng)).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 50.0 * 0.5**0.5)),)


@DEFENSES.register("whole_numbers")
@dataclass(frozen=True)
class WholeNumbers(Defense):
    """Add 16 times a rounded Gaussian number to each entry, as one does before a masked sum."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g + 16.0 * (4 * torch.randn(g.shape, generator=rng)).round().to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 64.0)),)
