"""Gradient compression: send the largest entries only."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.countermeasures import Countermeasure, mask, simulate
from gradveil.defenses.base import DEFENSES, Defense, Place, check_choice, check_share
from gradveil.defenses.masking import largest
from gradveil.tree import Params, flatten
from gradveil.types import Update


@DEFENSES.register("pruning")
@dataclass(frozen=True)
class Pruning(Defense):
    """Zero the smallest entries of the gradient or of the update by absolute value (GC in Sun et al. 2020, table 2).

    Exactly ``round(share × size)`` entries go, of equal ones the first; the others are sent as they are.
    """

    share: float = 0.8  # of the entries set to zero
    per: Literal["tensor", "global"] = "tensor"  # the smallest of each tensor, or of all tensors together
    on: Literal["gradient", "update"] = "gradient"  # of each local step, or of what is sent

    def __post_init__(self) -> None:
        check_share(self.share)
        check_choice("per", self.per, ("tensor", "global"))
        check_choice("on", self.on, ("gradient", "update"))

    @property
    def acts_on(self) -> frozenset[Place]:
        """Where this defence acts, as set by ``on``."""
        return frozenset({self.on})

    def prune(self, gradient: Params) -> Params:
        """Return the gradient without its smallest entries; differentiable in the entries kept."""
        if self.per == "tensor":
            return {name: g * self._kept(g.flatten()).view_as(g) for name, g in gradient.items()}
        kept = self._kept(flatten(gradient))
        sizes = [g.numel() for g in gradient.values()]
        parts = zip(gradient.items(), kept.split(sizes), strict=True)
        return {name: g * part.view_as(g) for (name, g), part in parts}

    def _kept(self, entries: Tensor) -> Tensor:
        """Return 1 for each entry kept and 0 for the others, in the entries' own dtype (n,)."""
        zeroed = largest(-entries.detach().abs()[None], round(self.share * entries.numel()))[0]
        return torch.logical_not(zeroed).to(entries.dtype)

    def on_gradient(self, gradient: Params, rng: Generator) -> Params:
        """Prune the gradient of one local step."""
        return self.prune(gradient) if self.on == "gradient" else gradient

    def on_update(self, update: Update, rng: Generator) -> Update:
        """Prune the update before it is sent."""
        return replace(update, gradient=self.prune(update.gradient)) if self.on == "update" else update

    def adaptive(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        """Return: match the entries that were sent, or prune the server's trial gradients in the same way."""
        why = "Prunes its own trial gradients by the same rule inside the objective."
        return (mask("*"), simulate(self.prune, why, self.on))
