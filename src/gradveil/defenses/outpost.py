"""Noise where the Fisher information is: Outpost (Wang, Hugh and Li, INFOCOM 2023)."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from gradveil.countermeasures import Countermeasure
from gradveil.defenses.noise import draw_all, with_noise
from gradveil.defenses.pruning import Pruning
from gradveil.losses import CROSS_ENTROPY, Loss
from gradveil.privacy.noise import Source, is_secret, normal
from gradveil.protection.defense import DEFENSES, Defense, PerRound
from gradveil.ranges import Share, Weight
from gradveil.tree import Params, flatten, parameters
from gradveil.types import Batch, Observation


@DEFENSES.register("outpost")
@dataclass(frozen=True)
class Outpost(PerRound):
    """Prune the small entries, and add noise to those with the largest Fisher information (Wang et al. 2023).

    Of each tensor the ``pruned`` smallest entries are zeroed. The ``share`` of all entries whose squares, the diagonal
    of the empirical Fisher information, are largest get Gaussian noise of std ``scale`` × the tensor's risk: the
    variance of its weights in the round, at most 1. Where the weights are not known the risk is 1. The paper's decay of
    how often a client does so is left out: every step is defended.
    """

    title = "Pruning and noise by risk (Outpost)"

    draws_on_device: ClassVar[bool] = True

    scale: Weight = 0.8  # noise at a risk of 1
    share: Share = 0.4  # of all entries that get noise
    pruned: Share = 0.8  # of each tensor's entries that are zeroed
    _risks: tuple[tuple[str, float], ...] = field(default=(), repr=False, compare=False)

    def for_round(self, model: nn.Module, public: Batch | None, loss: Loss = CROSS_ENTROPY) -> Defense:
        found = ((n, float(w.detach().var()) if w.numel() > 1 else 0.0) for n, w in parameters(model).items())
        return replace(self, _risks=tuple((name, min(risk, 1.0)) for name, risk in found))

    def stds(self, gradient: Params) -> dict[str, float]:
        """Return the noise of each tensor, where there is any."""
        risks = dict(self._risks)
        return {name: self.scale * risks.get(name, 1.0) for name in gradient}

    def informed(self, gradient: Params) -> Params:
        """Return 1 for the entries that get noise, 0 for the others."""
        sizes = flatten(gradient).abs()
        count = round(self.share * len(sizes))
        chosen = torch.zeros_like(sizes)
        chosen[sizes.topk(count).indices] = 1.0
        parts = chosen.split([g.numel() for g in gradient.values()])
        return {name: part.view_as(g) for (name, g), part in zip(gradient.items(), parts, strict=True)}

    def on_gradient(self, gradient: Params, rng: Source) -> Params:
        left, chosen, stds = self._prune(gradient), self.informed(gradient), self.stds(gradient)
        if is_secret(rng):
            noisy = {name: with_noise(g, stds[name], rng) for name, g in left.items()}
            return {name: torch.where(chosen[name] > 0, noisy[name], g) for name, g in left.items()}
        noise = draw_all(normal, list(gradient.values()), rng)
        drawn = zip(gradient, noise, strict=True)
        return {name: left[name] + stds[name] * chosen[name] * n for name, n in drawn}

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = (
            "Prunes its own trial gradients by the same rule, leaves out what was sent as zero, weighs the rest by the "
            "known noise, and adds what public examples look like."
        )
        return (Countermeasure("whiten", why, self._whitened, "newton"),)

    def _whitened(self, seen: Observation) -> Observation:
        update = seen.update
        if update.rule.adaptive:  # Adam divides noise and gradient alike: no law is known of what is left
            return seen.masked("*")
        spread = update.rule.shares(update.num_steps)[1]
        known = {name: spread * std for name, std in self.stds(update.gradient).items()}
        return replace(seen.masked("*"), noise=seen.noise | known, simulate=self._prune)

    def _prune(self, gradient: Params) -> Params:
        return Pruning(self.pruned).prune(gradient)
