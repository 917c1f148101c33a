"""Factors and signs, public or drawn for a whole tensor."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain, undeclared, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params, flatten
from zoo.keeper import Truth, each

TRUTHS = {
    "clipping_only": Truth(
        "The direction is as it was: half of DP-SGD gives no privacy at all.", "scaling and signs", "whiten"
    ),
    "random_affine": Truth("Two unknown numbers for each tensor are too few.", "scaling and signs", "undeclared"),
    "random_scale": Truth(
        "The direction of each tensor is as it was: one unknown number each.", "scaling and signs", "undeclared"
    ),
    "random_signs": Truth(
        "The sizes of all entries are in the open: thousands of equations for 64 pixels.",
        "scaling and signs",
        "undeclared",
    ),
    "sign_flip": Truth(
        "One bit for each tensor is all that is secret: a few dozen cases to try.", "scaling and signs", "plain"
    ),
    "squashed": Truth("A function of single entries that has an inverse hides nothing.", "scaling and signs", "plain"),
    "tensor_scaling": Truth("The factors stand in the code.", "scaling and signs", "plain"),
}


@DEFENSES.register("clipping_only")
@dataclass(frozen=True)
class ClippingOnly(Defense):
    """Clip to norm 0.1; the noise that is declared was forgotten."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        factor = (0.1 / flatten(gradient).norm()).clamp(max=1.0)
        return each(gradient, lambda g: g * factor)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 0.1)),)


@DEFENSES.register("random_affine")
@dataclass(frozen=True)
class RandomAffine(Defense):
    """Send a g + b, with a between 0.1 and 10 and b of standard deviation 5, drawn for each tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            factor, shift = float(torch.rand((), generator=rng)), float(torch.randn((), generator=rng))
            return g * 10 ** (2 * factor - 1) + 5.0 * shift

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("random_scale")
@dataclass(frozen=True)
class RandomScale(Defense):
    """Multiply each tensor by a random number between 0.01 and 100."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g * 10 ** (4 * float(torch.rand((), generator=rng)) - 2)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("random_signs")
@dataclass(frozen=True)
class RandomSigns(Defense):
    """Toss a coin for each entry and turn its sign."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (2 * torch.randint(2, g.shape, generator=rng) - 1).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("sign_flip")
@dataclass(frozen=True)
class SignFlip(Defense):
    """Toss a coin for each tensor and turn its sign."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g if torch.rand((), generator=rng) < 0.5 else -g

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("squashed")
@dataclass(frozen=True)
class Squashed(Defense):
    """Send tanh(3 g) / 100."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: (3 * g).tanh() / 100)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("tensor_scaling")
@dataclass(frozen=True)
class TensorScaling(Defense):
    """Multiply the tensors by 100, 0.01, 100, ... in turn."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {name: g * (0.01 if i % 2 else 100.0) for i, (name, g) in enumerate(gradient.items())}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
