"""A small world: synthetic images, ragged clients."""

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil.countermeasures import plain
from gradveil.data import Dataset
from gradveil.data.base import from_arrays
from gradveil.federated.client import Sent
from gradveil.federated.engines import Pool, Sequential, World
from gradveil.protection.defense import Defense, PerRound
from gradveil.tree import Params
from gradveil.types import Batch


def tiny_dataset(n: int = 60, side: int = 6, classes: int = 3) -> Dataset:
    """Images whose brightest row tells the class."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % classes
    images = 0.2 * rng.random((n, 1, side, side))
    images[np.arange(n), 0, labels] += 0.7
    return from_arrays("tiny", (images, labels), (images, labels))


def tiny_model(seed: int = 0, batchnorm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conv = nn.Conv2d(1, 3, 3, padding=1)
        norm = [nn.BatchNorm2d(3)] if batchnorm else []
        return nn.Sequential(conv, *norm, nn.Tanh(), nn.Flatten(), nn.Linear(108, 3))


def ragged_clients() -> list[np.ndarray]:
    """Five clients of 3, 7, 20, 11 and 19 examples."""
    return np.split(np.random.default_rng(1).permutation(60), [3, 10, 30, 41])


class Unwilling(nn.Linear):
    """Fails in training, as a user's model may."""

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


class Absent(nn.Linear):
    """Ends its process."""

    def forward(self, x: Tensor) -> Tensor:
        os._exit(3)


def spoil(pool: Pool, nan: float = 0.0, shape: float = 0.0) -> Pool:
    """Return a pool whose clients' updates hold NaN, or have another shape, with these chances."""
    rng, honest = np.random.default_rng(0), pool.train

    def one(sent: Sent, draw: float) -> Sent:
        name, value = next(iter(sent.update.gradient.items()))
        worse = torch.full_like(value, float("nan")) if draw < nan else value.flatten()[1:]
        gradient = dict(sent.update.gradient) | {name: worse}
        return replace(sent, update=replace(sent.update, gradient=gradient)) if draw < nan + shape else sent

    pool.train = lambda *job: [one(sent, rng.random()) for sent in honest(*job)]  # type: ignore[method-assign]
    return pool


@dataclass(frozen=True)
class Spoiled(Sequential):
    """One client after the other; some of their updates arrive spoiled."""

    nan: float = 0.0
    shape: float = 0.0

    def start(self, world: World) -> Pool:
        return spoil(super().start(world), self.nan, self.shape)


@dataclass(frozen=True)
class StopsWhereItBegan(PerRound):
    """Sends nothing in a round whose weights it was shown, else what it has."""

    shown: bool = False

    def for_round(self, model: nn.Module, public: Batch | None, loss: Any = None) -> Defense:
        return StopsWhereItBegan(True)

    def on_gradient(self, gradient: Params, rng: torch.Generator) -> Params:
        return {name: g * (not self.shown) for name, g in gradient.items()}

    def servers(self, model: nn.Module) -> Any:
        return (plain(),)
