"""Mixtures of examples in place of the examples: mixup (Zhang et al., ICLR 2018)."""

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError
from gradveil.privacy.noise import Source, beta, permutation, uniform
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.passes import Change, Changed
from gradveil.ranges import Positive
from gradveil.types import Batch, GaussianPrior, Observation

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6)  # that a server tries
GUESS = 0.75  # of more than two images: the mean of the larger share


@DEFENSES.register("mixup")
@dataclass(frozen=True)
class Mixup(Defense):
    """Train on λ x_i + (1 - λ) x_j for a random partner j, λ ~ Beta(alpha, alpha) for each batch (Zhang et al. 2018).

    The label of a mixture is that of x_i with chance λ, else that of x_j, which gives the loss of mixed labels on
    average; numbers are mixed themselves. A batch of one example has no partner and stays as it is.
    """

    title = "Mixed examples"

    alpha: Positive = 1.0  # 1: every λ is as likely; below, most are near 0 or 1

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        if not batch.labelled:
            raise DefenseError("mixup mixes labels as well, and here there are none: a guard sees the inputs only.")
        partner = permutation(len(batch), rng)
        share = beta(self.alpha, rng)
        inputs = share * batch.inputs + (1 - share) * batch.inputs[partner]
        if batch.labels.is_floating_point():
            return Batch(inputs, share * batch.labels + (1 - share) * batch.labels[partner])
        own = uniform((len(batch),), rng) < share
        own = own.to(batch.labels.device).view(-1, *[1] * (batch.labels.ndim - 1))
        return Batch(inputs, torch.where(own, batch.labels, batch.labels[partner]))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = (
            "Rebuilds the mixtures, tells by what public examples look like in which shares two of them were mixed, "
            "and looks for the images before; more than two it mixes by a guess."
        )
        return (Countermeasure("unmix", why, _Unmixing()),)


class _Unmixing:
    """The view of a server that mixes its own trials of two images in the likeliest shares."""

    def __init__(self) -> None:
        self.models: dict[tuple[int, float], Changed] = {}  # one each: updates that share it are solved together

    def __call__(self, seen: Observation) -> Observation:
        share = 1.0 if seen.num_examples == 1 else GUESS
        if seen.num_examples == 2:
            mixed = build_attack("newton").reconstruct(seen, Generator().manual_seed(0)).inputs.flatten(1).double()
            share = min(SHARES, key=lambda share: _unlikely(mixed, share, seen))
        if share == 1.0:
            return seen
        key = (id(seen.model), share)
        if key not in self.models:
            self.models[key] = Changed(seen.model, _mixing(share))
        return replace(seen, model=self.models[key])


def _mixing(share: float) -> Change:
    return lambda x: share * x + (1 - share) * x.roll(1, 0)


def _unlikely(mixed: Tensor, share: float, seen: Observation) -> float:
    """Return how unlikely two images are whose mixtures (2, d) these would be: by the prior, and by the data range."""
    low, high = seen.bounds
    prior = seen.prior or GaussianPrior.white(torch.full((mixed.shape[1],), (low + high) / 2), 0.3)
    images = (share * mixed - (1 - share) * mixed.flip(0)) / (2 * share - 1)
    away = (images.clamp(low, high) - prior.mean.to(images)).to(prior.mean)
    outside = (images - images.clamp(low, high)).square().sum() / 0.05**2  # of an attack's own errors
    volume = mixed.shape[1] * 2 * torch.log(torch.tensor(2 * share - 1))  # of what is squeezed into the mixtures
    return float(torch.linalg.vecdot(away, prior.whiten(away)).sum() + outside + volume)
