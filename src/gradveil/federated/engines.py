"""How the clients of a round are run: the base, and the plain way of one after the other."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

import torch
from torch import nn

from gradveil.data.base import Split
from gradveil.data.partition import Indices
from gradveil.federated.client import Sent, train_client
from gradveil.federated.settings import Local
from gradveil.privacy.noise import SecretDraws, Source
from gradveil.protection.defense import Defense
from gradveil.registry import Registry
from gradveil.types import Batch

ENGINES: Registry["Engine"] = Registry("engine", "federated")


@dataclass(frozen=True)
class World:
    """What stays the same from round to round."""

    model: nn.Module  # architecture and device; its weights are not used
    train: Split
    defense: Defense
    local: Local


@dataclass(frozen=True)
class Job:
    """One client's work in one round."""

    client: int
    indices: Indices  # the examples it holds
    seed: int | None  # of its shuffling and of its defence's randomness in a simulation; None: secret draws
    start: nn.Module | None = None  # the model that it receives; None: the one of the round
    defense: Defense | None = None  # None: the one of the world


class Pool(ABC):
    """An engine at work: holds processes or device memory until it is closed."""

    @abstractmethod
    def train(self, model: nn.Module, jobs: Sequence[Job], lr: float) -> list[Sent]:
        """Return what each client sends when all start from the weights of ``model``, which stays as it is."""

    def expect(self, jobs: Sequence[Job]) -> None:  # noqa: B027 - most pools have nothing to prepare
        """Hear which jobs come next, while a device may still be at work on the last ones."""

    def close(self) -> None:  # noqa: B027 - most pools hold nothing
        """Give back what the pool holds."""

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine(ABC):
    """Settings are the dataclass fields."""

    spec_name: ClassVar[str]

    @abstractmethod
    def start(self, world: World) -> Pool:
        """Return a pool that trains clients of this world."""


@ENGINES.register("sequential")
@dataclass(frozen=True)
class Sequential(Engine):
    """One client after the other, in this process: the reference. Works for every model and defence."""

    def start(self, world: World) -> Pool:
        return _SequentialPool(world)


class _SequentialPool(Pool):
    def __init__(self, world: World) -> None:
        self.world, self.model = world, copy.deepcopy(world.model)

    def train(self, model: nn.Module, jobs: Sequence[Job], lr: float) -> list[Sent]:
        return [self._one(model, job, lr) for job in jobs]

    def _one(self, model: nn.Module, job: Job, lr: float) -> Sent:
        copy_state(job.start or model, self.model)
        return work(self.model, self.world, job, lr)


def work(model: nn.Module, world: World, job: Job, lr: float) -> Sent:
    """Train one client in place on ``model``, which holds the weights that the server sent."""
    first = next(model.parameters())
    batch = world.train.batch(job.indices)
    examples = Batch(batch.inputs.to(first), batch.labels.to(first.device))
    return train_client(model, examples, job.defense or world.defense, lr, draws_of(job), world.local)


def draws_of(job: Job, device: torch.device | str = "cpu") -> Source:
    """Return where a client's randomness comes from."""
    where = torch.device(device)
    return SecretDraws(where) if job.seed is None else torch.Generator(where).manual_seed(job.seed)


def copy_state(source: nn.Module, target: nn.Module) -> None:
    """Copy weights and buffers from one model to another of the same kind."""
    with torch.no_grad():
        values = [*source.parameters(), *source.buffers()]
        for value, place in zip(values, [*target.parameters(), *target.buffers()], strict=True):
            place.copy_(value)
