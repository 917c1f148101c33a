"""The gradient in another basis or order, which whoever has the code turns back."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, plain, undeclared
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.tree import Params
from zoo.keeper import Truth, each

TRUTHS = {
    "fixed_permutation": Truth("The permutation stands in the code and is undone.", "another basis", "plain"),
    "fixed_rotation": Truth("A known rotation is undone by its transpose.", "another basis", "plain"),
    "hadamard": Truth("A change of basis hides nothing from who knows the basis.", "another basis", "undeclared"),
    "random_order": Truth(
        "The values themselves are in the open: sorted, they are thousands of equations for 64 pixels.",
        "another basis",
        "plain",
    ),
}


@DEFENSES.register("fixed_permutation")
@dataclass(frozen=True)
class FixedPermutation(Defense):
    """Shuffle the entries of each tensor, always in the same way."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            order = torch.randperm(g.numel(), generator=Generator().manual_seed(99)).to(g.device)
            return g.flatten()[order].view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("fixed_rotation")
@dataclass(frozen=True)
class FixedRotation(Defense):
    """Turn each tensor by eight reflections at planes that are always the same."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        def change(g: Tensor) -> Tensor:
            flat, own = g.flatten(), Generator().manual_seed(5)
            for _ in range(8):
                normal = torch.randn(g.numel(), generator=own).to(g)
                flat = flat - 2 * normal * (normal @ flat) / (normal @ normal)
            return flat.view_as(g)

        return each(gradient, change)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)


@DEFENSES.register("hadamard")
@dataclass(frozen=True)
class Hadamard(Defense):
    """Transform as many entries of each tensor as a power of two has; the rest stays."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, _transformed)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (undeclared(),)


def _transformed(g: Tensor) -> Tensor:
    changed = g.flatten().clone()
    length = 2 ** (g.numel().bit_length() - 1)
    part, half = changed[:length], 1
    while half < length:
        pairs = part.view(-1, 2, half)
        part = (0.5**0.5 * (pairs.flip(1) + pairs * pairs.new_tensor([[1.0], [-1.0]]))).reshape(-1)
        half *= 2
    changed[:length] = part
    return changed.view_as(g)


@DEFENSES.register("random_order")
@dataclass(frozen=True)
class RandomOrder(Defense):
    """Shuffle the entries of each tensor by a secret permutation."""

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        return each(gradient, lambda g: g.flatten()[torch.randperm(g.numel(), generator=rng).to(g.device)].view_as(g))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        return (plain(),)
