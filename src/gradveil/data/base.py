"""What a data set is: two splits of images held as small integers, and ``load``."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradveil.errors import DataError
from gradveil.registry import Registry, import_object, is_import_path
from gradveil.types import Batch

DATASETS: Registry["Source"] = Registry("dataset", "gradveil.data")

Array = NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Examples and labels; the examples may lie in a memory-mapped file."""

    images: Array  # (N, *shape), uint8 in 0..scale, or floats in [0, 1] with scale 1
    labels: Tensor  # (N,) int64
    scale: float = 255.0

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"There are {len(self.images)} images and {len(self.labels)} labels; they must be as many.")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Any = slice(None)) -> Batch:
        """Return the chosen examples as floats in [0, 1]; without indices, all of them."""
        if isinstance(indices, Tensor):
            indices = indices.numpy()
        chosen = torch.from_numpy(np.array(self.images[indices]))  # a copy: the file stays as it is
        labels = self.labels[torch.from_numpy(np.asarray(indices)) if not isinstance(indices, slice) else indices]
        return Batch(chosen.float() / self.scale, labels)


@dataclass(frozen=True)
class Dataset:
    """A data set: what the clients train on, and what accuracy is measured on."""

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise DataError(f"The {part} split of {self.name!r} is empty. Check the folder it was read from.")
            low, high = int(split.labels.min()), int(split.labels.max())
            if low < 0 or high >= self.num_classes:
                raise DataError(
                    f"The labels of {self.name!r} ({part}) go from {low} to {high}; with {self.num_classes} classes "
                    f"they must lie in 0..{self.num_classes - 1}."
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise DataError(
                f"{self.name!r} has inputs of shape {self.train.images.shape[1:]} in train and "
                f"{self.test.images.shape[1:]} in test; they must be the same."
            )

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (channels, height, width) for images."""
        return tuple(self.train.images.shape[1:])


class Source(ABC):
    """Where a data set comes from. Settings are the dataclass fields."""

    spec_name: ClassVar[str]

    @abstractmethod
    def load(self, data: Path | None) -> Dataset:
        """Return the data set; ``data`` is the local data folder, where there is one."""


def load(name: str | Source | Dataset | Callable[..., Any], data: str | Path | None = None) -> Dataset:
    """Return a data set by name, e.g. ``digits``, ``mnist`` or ``folder:path=photos,size=32``.

    ``data`` (or the environment variable ``GRADVEIL_DATA``) names the local data folder. A function, or
    ``package.module:function``, gives a user's own data: it returns a ``Dataset``, ``(inputs, labels)``, or a pair of
    these for train and test, and is called with ``data=`` where its signature takes it.
    """
    if isinstance(name, Dataset):
        return name
    text = data if data is not None else os.environ.get("GRADVEIL_DATA")
    folder = Path(text).expanduser() if text else None
    if data is not None and folder is not None and not folder.is_dir():
        raise DataError(f"The data folder {str(folder)!r} does not exist. Give an existing folder, or leave it out.")
    factory = import_object(name) if isinstance(name, str) and is_import_path(name) else name
    if callable(factory):
        from gradveil.data.own import from_result

        takes_data = "data" in inspect.signature(factory).parameters
        label = name if isinstance(name, str) else getattr(factory, "__name__", "own")
        return from_result(label, factory(data=folder) if takes_data else factory())
    if isinstance(factory, Dataset):
        return factory
    return DATASETS.build(factory).load(folder)
