"""Noise that is too weak, is not everywhere, or is drawn from few numbers."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, undeclared, whiten
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from gradveil.types import Batch
from zoo.keeper import Truth, each, noisy

TRUTHS = {
    "one_layer_noise": Truth(
        "All other tensors are sent as they are, and they suffice.", "noise in some places", "whiten"
    ),
    "weights_not_biases": Truth(
        "The biases' gradients are exact, and with what images look like they tell this one from others.",
        "noise in some places",
        "whiten",
    ),
    "low_rank_noise": Truth(
        "A matrix less its largest singular part is nearly free of it.", "noise of few numbers", "whiten"
    ),
    "row_noise": Truth("A row less its mean is free of it.", "noise of few numbers", "whiten"),
    "same_noise": Truth(
        "Differences between entries are as they were: one unknown number is too few.", "noise of few numbers", "whiten"
    ),
    "little_input_noise": Truth(
        "The noisy image is recovered, and it shows what it is of.", "weak noise", "undeclared"
    ),
    "too_small": Truth(
        "The noise is a thousandth of the gradient; all else about it is honest.", "weak noise", "whiten"
    ),
}


@DEFENSES.register("one_layer_noise")
@dataclass(frozen=True)
class OneLayerNoise(Defense):
    """Add strong noise to the last two tensors, and declare it for all."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | noisy({name: gradient[name] for name in list(gradient)[-2:]}, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("weights_not_biases")
@dataclass(frozen=True)
class WeightsNotBiases(Defense):
    """Add noise of standard deviation 5 to tensors with two dimensions or more."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | noisy({name: g for name, g in gradient.items() if g.ndim > 1}, rng, 5.0)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("low_rank_noise")
@dataclass(frozen=True)
class LowRankNoise(Defense):
    """Add an outer product of two Gaussian vectors to each matrix; on a bias that is noise of the usual kind."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            rows, columns = (torch.randn(n, generator=rng).to(g) for n in (len(g), g[0].numel()))
            return g + 5.0 * torch.outer(rows, columns).view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("row_noise")
@dataclass(frozen=True)
class RowNoise(Defense):
    """Draw one Gaussian number of standard deviation 5 for each row of each tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            return g + 5.0 * torch.randn(len(g), *[1] * (g.ndim - 1), generator=rng).to(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("same_noise")
@dataclass(frozen=True)
class SameNoise(Defense):
    """Draw one Gaussian number of standard deviation 5 and add it to every entry of every tensor."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        shift = 5.0 * float(torch.randn((), generator=rng))
        return each(gradient, lambda g: g + shift)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 5.0)),)


@DEFENSES.register("little_input_noise")
@dataclass(frozen=True)
class LittleInputNoise(Defense):
    """Add Gaussian noise of standard deviation 0.1 to each image."""

    def on_batch(self, batch: Batch, rng: Generator) -> Batch:
        noise = torch.randn(batch.inputs.shape, generator=rng)
        return replace(batch, inputs=batch.inputs + 0.1 * noise.to(batch.inputs))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


@DEFENSES.register("too_small")
@dataclass(frozen=True)
class TooSmall(Defense):
    """Add Gaussian noise of standard deviation 0.0001."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return noisy(gradient, rng, 1e-4)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (whiten(lambda seen: dict.fromkeys(seen.update.gradient, 1e-4)),)
