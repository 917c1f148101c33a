"""Examples that are transformed before they are trained on: ATS (Gao et al., CVPR 2021)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure
from gradveil.errors import DefenseError
from gradveil.privacy.noise import Source, integers
from gradveil.protection.defense import DEFENSES, Defense
from gradveil.protection.passes import Change, Changed
from gradveil.types import Batch, GaussianPrior, Observation

Kind = Literal["across", "down", "contrast", "brightness"]

Steps = tuple[tuple[Kind, float], ...]  # one after the other, magnitudes with their signs

# The paper's best hybrid for CIFAR-100, 3-1-7+43-18-18 of AutoAugment's library (Cubuk et al. 2019).
POLICIES: tuple[Steps, ...] = (
    (("across", 150 / 331), ("contrast", 3 / 9), ("down", 150 / 331 * 2 / 9)),
    (("down", 150 / 331 * 3 / 9), ("contrast", 3.5 / 9), ("contrast", 3.5 / 9)),
)


@DEFENSES.register("ats")
@dataclass(frozen=True)
class Ats(Defense):
    """Train on transformed images, by a policy that was searched for to hide them (ATS, Gao et al. 2021).

    Of the policies, rows of transformations, each image gets one at random, and each transformation goes one way or the
    other. Images lie within [0, 1].
    """

    title = "Transformed images"

    keeps_apart: ClassVar[bool] = True

    def on_batch(self, batch: Batch, rng: Source) -> Batch:
        if batch.inputs.ndim != 4:
            raise DefenseError(
                f"ats transforms images (N, C, H, W); these are {tuple(batch.inputs.shape)}. "
                "Use veil, gaussian or pruning."
            )
        alike: dict[Steps, list[int]] = {}  # images that get the same
        for n in range(len(batch)):
            alike.setdefault(self._drawn(rng), []).append(n)
        inputs = torch.empty_like(batch.inputs)
        for steps, some in alike.items():
            inputs[some] = transformed(batch.inputs[some], steps)
        return replace(batch, inputs=inputs)

    def _drawn(self, rng: Source) -> Steps:
        chosen = POLICIES[int(integers(len(POLICIES), (), rng))]
        signs = (2 * integers(2, (len(chosen),), rng) - 1).tolist()
        return tuple((kind, sign * size) for (kind, size), sign in zip(chosen, signs, strict=True))

    def possible(self) -> Iterator[Steps]:
        for steps in POLICIES:
            for signs in product((-1, 1), repeat=len(steps)):
                yield tuple((kind, sign * size) for (kind, size), sign in zip(steps, signs, strict=True))

    def servers(self, model: nn.Module) -> tuple[Countermeasure, ...]:
        why = (
            "Rebuilds the transformed image, tells by what public examples look like which transformation it had, and "
            "looks for the image before it."
        )
        return (Countermeasure("undo", why, _Undoing(tuple(dict.fromkeys(self.possible())))),)


class _Undoing:
    """The view of a server that puts each image's likeliest transformation before its model.

    Images keep their places where their classes differ, by which an attack orders them.
    """

    def __init__(self, possible: tuple[Steps, ...]) -> None:
        self.possible = possible
        self.models: dict[
            tuple[int, tuple[Steps, ...]], Changed
        ] = {}  # one each: updates that share it are solved together

    def __call__(self, seen: Observation) -> Observation:
        prior = seen.prior or GaussianPrior.white(torch.full(seen.input_shape, sum(seen.bounds) / 2), 0.3)
        found = build_attack("newton").reconstruct(seen, Generator().manual_seed(0)).inputs
        had = tuple(self._likeliest(x, prior) for x in found)
        key = (id(seen.model), had)
        if key not in self.models:
            self.models[key] = Changed(seen.model, _each(had))
        return replace(seen, model=self.models[key])

    def _likeliest(self, x: Tensor, prior: GaussianPrior) -> Steps:
        return max(self.possible, key=lambda steps: _log_likelihood(x, steps, prior))


def _each(had: tuple[Steps, ...]) -> Change:
    return lambda x: torch.stack([transformed(one, had[n % len(had)]) for n, one in enumerate(x.unbind())])


def _log_likelihood(found: Tensor, steps: Steps, prior: GaussianPrior) -> float:
    """Return how likely a transformed image (C, H, W) is by a Gaussian over images before, up to a constant."""
    shape = found.shape
    nothing = transformed(torch.zeros(shape).to(found), steps, within=False)
    moved = transformed(prior.factor.T.reshape(-1, *shape).to(found), steps, within=False) - nothing
    mean = transformed(prior.mean.reshape(shape).to(found), steps, within=False)
    spread, ridge = moved.flatten(1).double(), prior.ridge + 1e-3  # (k, d)
    away = (found - mean).flatten().double()
    inner = ridge * torch.eye(len(spread)).to(spread) + spread @ spread.T
    pull = spread @ away
    inside = torch.linalg.solve(inner, pull)
    return -0.5 * float((away @ away - pull @ inside) / ridge + torch.logdet(inner))


def transformed(x: Tensor, steps: Steps, within: bool = True) -> Tensor:
    """Return images (..., C, H, W) after the steps, one after the other; ``within``: kept in [0, 1]."""
    for kind, size in steps:
        if kind in ("across", "down"):
            dim = -1 if kind == "across" else -2
            x = _shifted(x, round(size * x.shape[dim]), dim)
        elif kind == "brightness":
            x = (1 + size) * x
        else:
            mean = x.mean((-3, -2, -1), keepdim=True)
            x = mean + (1 + size) * (x - mean)
        x = x.clamp(0, 1) if within else x
    return x


def _shifted(x: Tensor, by: int, dim: int) -> Tensor:
    if by == 0:
        return x
    length = x.shape[dim]
    empty = torch.zeros_like(x.narrow(dim, 0, abs(by)))
    kept = x.narrow(dim, max(by, 0), length - abs(by))
    return torch.cat([kept, empty] if by > 0 else [empty, kept], dim)
