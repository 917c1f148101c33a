"""How a local step moves the weights, W <- W - lr d: written once, for clients and for attacks that unroll them."""

from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

import torch

from gradveil.errors import UpdateError, did_you_mean
from gradveil.ranges import Decay, Weight, check
from gradveil.tree import Params

OPTIMIZERS = ("sgd", "adam", "adamw")
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of Adam, as torch has them
_TINY = 1e-37  # a root of it has a slope


@dataclass(frozen=True)
class Momenta:
    """What an optimiser remembers of the steps before."""

    steps: int = 0
    first: Params = field(default_factory=dict)
    second: Params = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What a client's optimiser makes of the gradient of a step; the formulas are those of ``torch.optim``.

    In order: FedProx's pull is part of the gradient, then the gradient is clipped, then the optimiser takes it.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Decay = 0.0  # of sgd
    weight_decay: Weight = 0.0
    proximal: Weight = 0.0  # FedProx (Li et al. 2020): mu/2 ||W - W_t||² is added to the loss
    clip: Weight = 0.0  # the largest norm of a step's gradient; 0: it is not clipped

    def __post_init__(self) -> None:
        check(self, UpdateError)
        if self.optimizer not in OPTIMIZERS:
            hint = did_you_mean(self.optimizer, OPTIMIZERS)
            raise UpdateError(f"No optimizer is called {self.optimizer!r}. {hint}Known: {', '.join(OPTIMIZERS)}.")
        if self.momentum and self.optimizer != "sgd":
            raise UpdateError(f"momentum={self.momentum} belongs to sgd; {self.optimizer} has its own. Leave it out.")

    @property
    def rule(self) -> "StepRule":
        return StepRule(**{name: getattr(self, name) for name in StepRule.__dataclass_fields__})

    @property
    def is_plain(self) -> bool:
        return self.rule == PLAIN

    @property
    def adaptive(self) -> bool:
        """Whether each entry is divided by its own size: of a first step only the signs are left."""
        return self.optimizer != "sgd"

    def direction(
        self, gradient: Params, weights: Params, start: Params, before: Momenta, blur: float = 0.0
    ) -> tuple[Params, Momenta]:
        """Return d, and what is remembered for the next step. Differentiable.

        ``blur``: Adam divides by the root mean square of the tensor, times this, as well. Its steps are signs of the
        gradient almost, which have no slope to follow; a blurred one has.
        """
        if self.proximal:
            gradient = {n: g + self.proximal * (weights[n] - start[n]) for n, g in gradient.items()}
        if self.clip:
            norm = torch.stack([g.square().sum() for g in gradient.values()]).sum().clamp_min(_TINY).sqrt()
            factor = (self.clip / (norm + 1e-6)).clamp_max(1.0)
            gradient = {n: g * factor for n, g in gradient.items()}
        if self.weight_decay and self.optimizer != "adamw":
            gradient = {n: g + self.weight_decay * weights[n] for n, g in gradient.items()}
        if self.adaptive:
            return self._adam(gradient, weights, before, blur)
        if not self.momentum:
            return gradient, before
        kept = {n: self.momentum * before.first[n] + g if before.first else g for n, g in gradient.items()}
        return kept, Momenta(before.steps + 1, kept)

    def _adam(self, gradient: Params, weights: Params, before: Momenta, blur: float) -> tuple[Params, Momenta]:
        steps = before.steps + 1
        first = {n: (1 - BETA1) * g for n, g in gradient.items()}
        second = {n: (1 - BETA2) * g.square() for n, g in gradient.items()}
        if before.steps:
            first = {n: m + BETA1 * before.first[n] for n, m in first.items()}
            second = {n: v + BETA2 * before.second[n] for n, v in second.items()}
        moved = {}
        for n, m in first.items():
            size = second[n] / (1 - BETA2**steps)
            root = size.clamp_min(_TINY).sqrt() + EPS
            if blur:
                root = root + blur * size.mean().clamp_min(_TINY).sqrt()
            moved[n] = m / (1 - BETA1**steps) / root
            if self.weight_decay and self.optimizer == "adamw":
                moved[n] = moved[n] + self.weight_decay * weights[n]
        return moved, Momenta(steps, first, second)

    def shares(self, steps: int) -> tuple[float, float]:
        """Return how much the gradients of so many steps count in their sum: Σ c_t and sqrt(Σ c_t²).

        A gradient that momentum keeps counts (1 - mᵗ) / (1 - m) times, t steps before the end.
        """
        if not self.momentum:
            return float(steps), sqrt(steps)
        counts = [(1 - self.momentum**t) / (1 - self.momentum) for t in range(1, steps + 1)]
        return sum(counts), sqrt(sum(c * c for c in counts))

    def without_decay(self, total: Params, weights: Params, steps: int) -> Params:
        """Return the mean gradient behind a sum of directions: exact for one step, else at the first weights.

        Weight decay that stands beside the gradient is known and taken off. What is left is what ``bare`` makes
        of a gradient.
        """
        count = self.shares(steps)[0]
        decay = 0.0 if self.optimizer == "adam" else self.weight_decay
        return {n: d / count - decay * weights[n].to(d) if decay else d / count for n, d in total.items()}

    @property
    def bare(self) -> "StepRule":
        """The rule of a single step whose decay has been taken off."""
        coupled = self.weight_decay if self.optimizer == "adam" else 0.0
        return StepRule(optimizer=self.optimizer, weight_decay=coupled, clip=self.clip)

    def __str__(self) -> str:
        parts = {
            "momentum": self.momentum,
            "weight decay": self.weight_decay,
            "FedProx": self.proximal,
            "clip": self.clip,
        }
        return ", ".join([self.optimizer, *(f"{name} {value:g}" for name, value in parts.items() if value)])


PLAIN = StepRule()  # SGD
