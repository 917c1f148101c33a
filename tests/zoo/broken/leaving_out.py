"""A part of the gradient is left out."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, drop, plain
from gradveil.modules import find_layer
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTHS = {
    "dead_units": Truth("The smallest entries carry least, and all other layers are untouched.", "leaving out", "drop"),
    "no_biases": Truth("It stops the division dW / db and nothing else.", "leaving out", "plain"),
    "no_last_layer": Truth("All other layers suffice; the author drops the wrong tensor.", "leaving out", "drop"),
    "random_entries": Truth("The others are exact, and a zero shows what was left out.", "leaving out", "plain"),
    "top_entries": Truth("What is sent is exact, and where it is zero can be seen.", "leaving out", "plain"),
}


@DEFENSES.register("dead_units")
@dataclass(frozen=True)
class DeadUnits(Defense):
    """Zero the tenth of the last layer's input that is smallest."""

    def layers(self, model: nn.Module) -> tuple[str, ...]:
        return (find_layer(model, None),)

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        flat = r.flatten(1)
        count = max(1, flat.shape[1] // 10)
        return flat.scatter(1, flat.abs().topk(count, largest=False).indices, 0.0).view_as(r)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(next(iter(dict(model.named_parameters())))),)


@DEFENSES.register("no_biases")
@dataclass(frozen=True)
class NoBiases(Defense):
    """Send zeros for tensors with one dimension."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return {name: torch.zeros_like(g) if g.ndim == 1 else g for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("no_last_layer")
@dataclass(frozen=True)
class NoLastLayer(Defense):
    """Send zeros for the last layer, off which labels are read."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return gradient | {name: torch.zeros_like(gradient[name]) for name in list(gradient)[-2:]}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (drop(next(iter(dict(model.named_parameters())))),)


@DEFENSES.register("random_entries")
@dataclass(frozen=True)
class RandomEntries(Defense):
    """Set a random third of the entries to zero, as dropout does."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g * (torch.rand(g.shape, generator=rng) > 1 / 3).to(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("top_entries")
@dataclass(frozen=True)
class TopEntries(Defense):
    """Send the tenth of each tensor that is largest."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            least = g.abs().flatten().topk(-(-g.numel() // 10)).values[-1]
            return g * (g.abs() >= least)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
