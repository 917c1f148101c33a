"""Gradients at a right angle to the true one: CENSOR (Zhang et al., NDSS 2025)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gradveil.countermeasures import Countermeasure
from gradveil.defenses.noise import draw_all
from gradveil.privacy.noise import Source, normal
from gradveil.protection.defense import DEFENSES, Accounted
from gradveil.protection.records import Records
from gradveil.ranges import Count
from gradveil.tree import Params
from gradveil.types import Observation

TINY = 1e-30


@DEFENSES.register("censor")
@dataclass(frozen=True)
class Censor(Accounted):
    """Send in place of each tensor's gradient a random one of its length, orthogonal to it (Zhang et al. 2025).

    Of ``trials`` draws the one is sent that raises the loss least. To first order none changes it; the paper runs the
    model again to see which does best, and here the empirical Fisher information of the batch, Σ_j ⟨g_j, v⟩², stands
    for the second order. The paper defends early rounds only, and sends the gradient itself where no draw lowers the
    loss; here every step is defended, so that what is learned is what random steps at a right angle teach.
    """

    title = "Orthogonal gradients"

    draws_on_device: ClassVar[bool] = True

    trials: Count = 20  # draws of which the best is sent

    def on_records(self, records: Records, slots: int, rng: Source) -> Params:
        mean = super().on_records(records, slots, rng)
        draws = zip(*(self._draw(mean, rng) for _ in range(self.trials)), strict=True)  # by tensor
        tried = {n: _turned(g, torch.stack(some)) for (n, g), some in zip(mean.items(), draws, strict=True)}
        rises = records.along(tried).square().sum(0)  # (trials,)
        best = int(rises.nan_to_num(nan=float("inf")).argmin())
        return {name: turned[best] for name, turned in tried.items()}

    def _draw(self, like: Params, rng: Source) -> list[Tensor]:
        return draw_all(normal, list(like.values()), rng)

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = "Compares the length of each tensor, and whether what was sent is orthogonal to its own trial's gradient."
        return (Countermeasure("orthogonal", why, _orthogonal, "newton"),)


def _turned(g: Tensor, draws: Tensor) -> Tensor:
    """Return draws (R, *shape) without their parts along g, each as long as g."""
    flat, along = draws.flatten(1), g.flatten()
    flat = flat - torch.outer(flat @ along / along.square().sum().clamp_min(TINY), along)
    turned: Tensor = flat * (along.norm() / flat.norm(dim=1, keepdim=True).clamp_min(TINY))
    return turned.view_as(draws)


def _orthogonal(seen: Observation) -> Observation:
    """Return the view in which each tensor is its length and its part along what was sent, which is zero."""
    sent = seen.update.gradient
    lengths = {name: y.norm() for name, y in sent.items()}

    def left(gradient: Params) -> Params:
        found = {}
        for name, g in gradient.items():
            along = (g * sent[name].to(g)).sum() / lengths[name].to(g).clamp_min(TINY) if name in sent else g.sum()
            two = torch.stack([g.square().sum().add(TINY).sqrt(), along])[: g.numel()]
            found[name] = torch.cat([two, g.new_zeros(max(g.numel() - 2, 0))]).view(g.shape)
        return found

    shown = {
        n: torch.zeros_like(y).flatten().index_fill(0, torch.tensor([0], device=y.device), 1.0) for n, y in sent.items()
    }
    target = {n: (lengths[n] * one).view_as(sent[n]) for n, one in shown.items()}
    return replace(seen, update=replace(seen.update, gradient=target), simulate=left, simulate_on="update", client=None)
