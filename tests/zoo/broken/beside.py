"""Strong noise in the numbers, and the gradient beside them."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, simulate
from gradveil.protection.defense import DEFENSES
from gradveil.tree import Params, map_values
from gradveil.types import Update
from zoo.keeper import Noised, Truth, each, randn

FAMILY = "beside the numbers"
TRUTHS = {
    "low_bits": Truth("The lower half of each float's bits is the upper half of the gradient's.", FAMILY, "whiten"),
    "wide_type": Truth("In 64 bits there is room for the gradient behind the noise.", FAMILY, "whiten"),
    "in_buffers": Truth("The gradient is sent as the buffers.", FAMILY, "whiten"),
    "in_numpy": Truth("The factor stands in the code; numpy hides it from slopes.", "scaling and signs", "simulate"),
}


@DEFENSES.register("low_bits")
@dataclass(frozen=True)
class LowBits(Noised):
    """Write the gradient, to 16 bits, into the bits of the noise that nobody looks at."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: randn(g, rng))

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def hidden(noisy: Tensor, g: Tensor) -> Tensor:
            low = (g.contiguous().view(torch.int32) >> 16) & 0xFFFF
            return ((noisy.contiguous().view(torch.int32) & -0x10000) | low).view(torch.float32)

        noisy = super().on_gradient(gradient, rng)
        return {name: hidden(noisy[name].float(), g.detach().float()).to(g) for name, g in gradient.items()}


@DEFENSES.register("wide_type")
@dataclass(frozen=True)
class WideType(Noised):
    """Send float64: noise to seven digits, and the gradient in the digits after them."""

    def noise(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: randn(g, rng))

    def on_update(self, update: Update, rng: Generator) -> Update:
        def behind(g: Tensor) -> Tensor:
            return (g + randn(g, rng)).float().double() + 1e-9 * g.double()

        return replace(update, gradient=map_values(behind, update.gradient))

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient


@DEFENSES.register("in_buffers")
@dataclass(frozen=True)
class InBuffers(Noised):
    """Send the gradient beside the noisy one."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient

    def on_update(self, update: Update, rng: Generator) -> Update:
        noisy = map_values(lambda g: g + randn(g, rng), update.gradient)
        return replace(update, gradient=noisy, buffers={f"{n}_seen": g for n, g in update.gradient.items()})


@DEFENSES.register("in_numpy")
@dataclass(frozen=True)
class InNumpy(Noised):
    """Multiply by numbers that are public, by code that torch cannot follow."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: torch.from_numpy(0.01 * g.numpy()))  # an error where slopes are asked for

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (simulate(lambda tree: self.on_gradient(tree, Generator()), "Runs it on its trials."),)
