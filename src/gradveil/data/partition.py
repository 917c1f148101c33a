"""Which device holds which examples: from labels to one array of indices per device.

Every rule shuffles first, so data that comes sorted by class is never cut into blocks of one class by accident.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from gradveil.data.base import Dataset, by_label
from gradveil.errors import DataError
from gradveil.ranges import Count, Range, Whole
from gradveil.registry import Registry

PARTITIONS: Registry["Partition"] = Registry("partition", "data")

Indices = NDArray[np.int64]
Devices = Annotated[int, Range(1, 10**6)]
Rng = np.random.Generator


class Partition(ABC):
    """Settings are the dataclass fields; the call gets the labels and a generator."""

    spec_name: ClassVar[str]
    by_class: ClassVar[bool] = True  # whether it looks at the labels, which must be class numbers then

    @abstractmethod
    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        """Return the indices that each device holds: disjoint arrays."""


def partition(
    labels: Any, spec: str | Partition = "iid:devices=10", rng: int | Rng | torch.Generator = 0
) -> list[Indices]:
    """Deal out examples to devices, e.g. ``classes:devices=100,classes=2,per_class=100``.

    ``labels`` (N,) are whole numbers; for ``iid`` they may be targets of any kind. ``rng`` is a seed or a generator.
    """
    values = np.asarray(labels)
    built = PARTITIONS.build(spec)
    if not isinstance(built, Partition):
        raise DataError(f"A {type(spec).__name__} is no partition. Give a spec such as iid:devices=10.")
    if built.by_class and (values.ndim != 1 or len(values) == 0 or not np.issubdtype(values.dtype, np.integer)):
        raise DataError(
            f"A partition by class needs labels (N,) of whole numbers; got {values.dtype} of shape {values.shape}. "
            f"Use iid:devices=... for other targets."
        )
    return built.split(values.astype(np.int64) if built.by_class else values, _generator(rng))


def deal(dataset: Dataset, spec: str | Partition, rng: int | Rng | torch.Generator = 0) -> list[Indices]:
    """Deal out a data set's examples to devices: by their labels, or ``natural``, by where they come from."""
    if not isinstance(spec, str) or PARTITIONS.get(spec.partition(":")[0]) is not Natural:
        return partition(dataset.train.labels, spec, rng)
    if dataset.groups is None:
        raise DataError(f"{dataset.name} does not say where its examples come from. Give a table with --by COLUMN.")
    return partition(dataset.groups, spec, rng)


def undealt(count: int, devices: Sequence[Indices]) -> Indices:
    """Return the examples, of so many, that no device holds."""
    left = np.ones(count, bool)
    for held in devices:
        left[np.asarray(held)] = False
    return np.flatnonzero(left)


def _generator(rng: int | Rng | torch.Generator) -> Rng:
    if isinstance(rng, torch.Generator):
        return np.random.default_rng(int(torch.randint(2**62, (1,), generator=rng)))
    return np.random.default_rng(rng)


def _check(needed: int, available: int) -> None:
    if needed > available:
        raise DataError(f"The partition asks for {needed} examples and the data set has {available}. Ask for fewer.")


@PARTITIONS.register("iid")
@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle, then cut into parts whose sizes differ by at most one, or of ``per_device`` each."""

    by_class = False

    devices: Devices = 10
    per_device: Count | None = None  # None: all examples are dealt out

    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        each = 1 if self.per_device is None else self.per_device
        _check(self.devices * each, len(labels))
        order = rng.permutation(len(labels))
        if self.per_device is not None:
            order = order[: self.devices * each]
        return np.array_split(order, self.devices)


@PARTITIONS.register("natural")
@dataclass(frozen=True)
class Natural(Partition):
    """One device for each place that examples come from: the hospitals of a table with ``--by hospital``."""

    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        return [rng.permutation(its) for its in by_label(labels)]


@PARTITIONS.register("classes")
@dataclass(frozen=True)
class Classes(Partition):
    """Give each device ``classes`` distinct classes and exactly ``per_class`` examples of each.

    The split of Sun et al. 2020: 100 devices x 2 classes x 100 examples (and x 20). Every class goes to as many
    devices as any other, give or take one, as far as there are examples for it.
    """

    devices: Devices = 100
    classes: Count = 2
    per_class: Count = 100

    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        _check(self.devices * self.classes * self.per_class, len(labels))
        known, sizes = np.unique(labels, return_counts=True)
        if self.classes > len(known):
            raise DataError(f"classes={self.classes}: the data set has only {len(known)} classes.")
        blocks = sizes // self.per_class
        chosen = self._even(blocks, rng)
        if chosen is None:
            chosen = self._by_stock(blocks, rng)
        pools = [rng.permutation(its) for its in by_label(labels)]
        taken = np.zeros(len(known), np.int64)
        parts = []
        for row in chosen:
            parts.append(np.concatenate([pools[c][taken[c] : taken[c] + self.per_class] for c in row]))
            taken[row] += self.per_class
        return parts

    def _even(self, blocks: Indices, rng: Rng) -> list[Indices] | None:
        """Deal the least used classes first; ``None`` where the rarer classes run out."""
        used = np.zeros_like(blocks)
        rows = []
        for _ in range(self.devices):
            order = rng.permutation(len(blocks))
            order = order[np.argsort(used[order], kind="stable")]
            row = order[blocks[order] > used[order]][: self.classes]
            if len(row) < self.classes:
                return None
            used[row] += 1
            rows.append(row)
        return rows

    def _by_stock(self, blocks: Indices, rng: Rng) -> list[Indices]:
        """Deal the classes with most examples left first: works whenever anything does."""
        left = blocks.copy()
        rows = []
        for device in range(self.devices):
            order = rng.permutation(len(left))
            row = order[np.argsort(-left[order], kind="stable")][: self.classes]
            if left[row].min() < 1:
                raise DataError(
                    f"There are too few examples for {self.devices} devices with {self.classes} classes x "
                    f"{self.per_class} each: only {device} can be served. Ask for fewer devices or examples per class."
                )
            left[row] -= 1
            rows.append(row)
        return rows


@PARTITIONS.register("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Sort by class, cut into equal shards, deal ``shards`` of them to each device (McMahan et al. 2017).

    A device may draw two shards of one class: use ``classes`` where each must have exactly that many classes.
    """

    devices: Devices = 100
    shards: Count = 2  # per device
    size: Count | None = None  # of a shard; None: as large as the data allows

    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        count = self.devices * self.shards
        _check(count * (self.size or 1), len(labels))
        size = self.size or len(labels) // count
        order = rng.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        starts = rng.permutation(len(labels) // size)[:count] * size
        shards = [order[start : start + size] for start in starts]
        return [np.concatenate(shards[i :: self.devices]) for i in range(self.devices)]


@PARTITIONS.register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Deal each class out in proportions drawn from Dirichlet(alpha); small alpha: few classes a device.

    All examples are dealt out. Proportions are drawn again until every device has ``min_size`` examples.
    """

    devices: Devices = 10
    alpha: Annotated[float, Range(1e-3, 1e6)] = 0.5
    min_size: Whole = 1

    def split(self, labels: Indices, rng: Rng) -> list[Indices]:
        _check(self.devices * self.min_size, len(labels))
        for _ in range(1000):
            parts = self._draw(labels, rng)
            if min(map(len, parts)) >= self.min_size:
                return parts
        raise DataError(
            f"No draw of dirichlet:alpha={self.alpha} gave each of {self.devices} devices {self.min_size} examples. "
            "Raise alpha, or lower devices or min_size."
        )

    def _draw(self, labels: Indices, rng: Rng) -> list[Indices]:
        pieces: list[list[Indices]] = [[] for _ in range(self.devices)]
        for its in by_label(labels):
            members = rng.permutation(its)
            shares = rng.dirichlet(np.full(self.devices, self.alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for device, piece in enumerate(np.split(members, cuts)):
                pieces[device].append(piece)
        return [rng.permutation(np.concatenate(piece)) for piece in pieces]
