"""What a data set is: two splits of examples, images held as small integers; ``load``, and a user's own arrays."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from gradveil.errors import DataError
from gradveil.imports import calling, import_object, is_import_path
from gradveil.losses import build as build_loss
from gradveil.modalities import IMAGE, Modality
from gradveil.modalities.table import Table
from gradveil.ranges import MOST_CLASSES
from gradveil.registry import Registry
from gradveil.types import Batch

DATASETS: Registry["Source"] = Registry("dataset", "data")

Array = NDArray[Any]
SHOWN = 40  # columns of which each is shown


@dataclass(frozen=True)
class Split:
    """Examples and labels; the examples may lie in a memory-mapped file."""

    images: Array  # (N, *shape), uint8 in 0..scale, or floats in [0, 1] with scale 1
    labels: Tensor  # (N,) int64; zeros and ones (N, K), float32 numbers (N,) or (N, D), or a mask of classes (N, H, W)
    scale: float = 255.0

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise DataError(f"There are {len(self.images)} inputs and {len(self.labels)} labels; they must be as many.")

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Any = slice(None)) -> Batch:
        """Return the chosen examples as floats in [0, 1]; without indices, all of them."""
        if isinstance(indices, Tensor):
            indices = indices.numpy()
        chosen = torch.from_numpy(np.array(self.images[indices]))  # a copy: the file stays as it is
        labels = self.labels[torch.from_numpy(np.asarray(indices)) if not isinstance(indices, slice) else indices]
        return Batch(chosen.float() / self.scale, labels)

    def sample(self, count: int, rng: Generator) -> Batch:
        """Return so many examples at random, none twice; all of them where there are not that many."""
        return self.batch(torch.randperm(len(self), generator=rng)[:count])


@dataclass(frozen=True)
class ColumnRead:
    """What a column of a table was read as."""

    name: str
    role: Literal["input", "target", "left out", "place"]
    how: str  # in words

    @property
    def line(self) -> str:
        return f"{self.name}: " + (self.how if self.role == "input" else f"{self.role}, {self.how}")


@dataclass(frozen=True)
class Dataset:
    """A data set: what the clients train on, and what accuracy is measured on."""

    name: str
    train: Split
    test: Split
    class_names: tuple[str, ...]
    modality: Modality = IMAGE  # what an example is
    groups: Array | None = None  # (N,) where each example to train on comes from, as numbers: a natural partition
    levels: tuple[float, float] | None = None  # of images of more than 8 bits: the values that became black and white
    columns_read: tuple[ColumnRead, ...] = ()  # of a table: what each was read as, to be shown before anything runs

    def __post_init__(self) -> None:
        for part, split in (("train", self.train), ("test", self.test)):
            if len(split) == 0:
                raise DataError(f"The {part} split of {self.name!r} is empty. Check the folder it was read from.")
            if split.labels.ndim > 1 or split.labels.is_floating_point():
                continue
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
        """How many classes there are; where targets are several numbers, how many."""
        return len(self.class_names)

    @property
    def columns_text(self) -> str:
        """What each column was read as, a line each; of a wide table only what is more than plain numbers."""
        told = self.columns_read
        if len(told) > SHOWN:
            plain = [one for one in told if one.role == "input" and (one.how == "numbers" or "categories:" in one.how)]
            told = (*(one for one in told if one not in plain), ColumnRead(f"{len(plain)} more", "input", "plain"))
        return "\n".join(one.line for one in told)

    @property
    def default_model(self) -> str:
        texts_with_classes = self.modality.spec_name == "tokens" and self.train.labels.ndim == 1
        return "bert_tiny" if texts_with_classes else self.modality.default_model

    def fitting_loss(self, wanted: str) -> str:
        """Return the loss of these targets: of tokens, cross-entropy is that of the next one at each place; of masks,
        that of the class at each place; numbers have squared error."""
        if wanted == "cross_entropy" and self.train.labels.is_floating_point():
            return "mse"
        if wanted in ("cross_entropy", "dense") and self.train.labels.ndim > 2:
            return f"dense:classes={self.num_classes}"
        tokens = self.modality.spec_name == "tokens" and self.train.labels.ndim == 2
        return "next_token" if wanted == "cross_entropy" and tokens else wanted

    def model_outputs(self, loss: str) -> int:
        """Return how many outputs a model has for this loss: of each place, where there are several."""
        return build_loss(loss).of(self.train.labels).outputs(self.train.labels, self.num_classes)

    def outputs(self, loss: str) -> int:
        """Return how many numbers a target has as a row of this loss; raise where it is no loss of these targets."""
        return build_loss(loss).of(self.train.labels).width(self.train.labels, self.num_classes)

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

    A file ``notes.txt`` is text, a folder ``photos`` images. ``data`` (or GRADVEIL_DATA) names the local data folder.
    A function, or ``package.module:function``, gives a user's own data: it returns a ``Dataset``, ``(inputs, labels)``,
    a pair of these for train and test, or a data set of Hugging Face's, and is called with ``data=`` where it takes
    that.
    """
    if isinstance(name, Dataset):
        return name
    if _is_of_hub(name):
        return from_result("own", name)
    text = data if data is not None else os.environ.get("GRADVEIL_DATA")
    folder = Path(text).expanduser() if text else None
    if data is not None and folder is not None and not folder.is_dir():
        raise DataError(f"The data folder {str(folder)!r} does not exist. Give an existing folder, or leave it out.")
    if isinstance(name, str) and "=" not in name and name not in DATASETS.names():
        kind = "text" if name.lower().endswith(".txt") else "folder" if inside(folder, name).is_dir() else ""
        if kind:
            return DATASETS.build(DATASETS.get(kind)(path=name)).load(folder)  # type: ignore[call-arg]
    factory = import_object(name) if isinstance(name, str) and is_import_path(name) else name
    if callable(factory):
        takes_data = "data" in inspect.signature(factory).parameters
        label = name if isinstance(name, str) else getattr(factory, "__name__", "own")
        with calling(f"The data set {label} cannot be made", DataError):
            return from_result(label, factory(data=folder) if takes_data else factory())
    if isinstance(factory, Dataset):
        return factory
    return DATASETS.build(factory).load(folder)


def inside(data: Path | None, given: str) -> Path:
    """Return a path as it was given, or in the data folder where it is nowhere else."""
    path = Path(given).expanduser()
    return data / path if data is not None and not path.exists() and (data / path).exists() else path


def from_arrays(name: str, train: tuple[Any, Any], test: tuple[Any, Any] | None = None) -> Dataset:
    """Return a data set from ``(inputs, labels)``; without a test split, a fifth of each class is set aside.

    Inputs are uint8 or floats in [0, 1], shaped (N, C, H, W), (N, H, W), (N, H, W, C) with 1 or 3 channels,
    or (N, D), the rows of a table whose columns are called x0, x1, ... Labels are class numbers from 0, (N,); zeros and
    ones, (N, K); numbers, (N,) or (N, D), as floats; or masks, (N, H, W), a class number from 0 for each pixel.
    """
    images, labels = _inputs(name, train[0]), _labels(name, train[1])
    if len(images) != len(labels) or len(images) == 0:
        raise DataError(f"{name!r} has {len(images)} inputs and {len(labels)} labels; give as many, and at least one.")
    if test is None:
        kept, aside = hold_out(labels, 0.2)
        pairs = [(images[kept], labels[kept]), (images[aside], labels[aside])]
    else:
        pairs = [(images, labels), (_inputs(name, test[0]), _labels(name, test[1]))]
    splits = [Split(x, torch.from_numpy(y), 255.0 if x.dtype == np.uint8 else 1.0) for x, y in pairs]
    if labels.ndim != 2 and labels.dtype == np.int64:
        count = 1 + max(int(split.labels.max()) for split in splits if len(split))
    else:
        count = labels[0].size
    modality = IMAGE if images.ndim == 4 else Table.of_vectors(splits[0].batch().inputs)
    return Dataset(name, splits[0], splits[1], numbered(count), modality)


def numbered(count: int) -> tuple[str, ...]:
    """Return names for so many classes: their numbers."""
    if count > MOST_CLASSES:
        raise DataError(f"The highest label is {count - 1:,}; there may be {MOST_CLASSES:,} classes, numbered from 0.")
    return tuple(map(str, range(count)))


def from_result(name: str, result: Any) -> Dataset:
    """Return the data set that a user's function gave: a ``Dataset``, a pair of arrays, or a pair of pairs."""
    if isinstance(result, Dataset):
        return result
    if _is_of_hub(result):
        from gradveil.data.folder import from_hub

        splits = result if isinstance(result, dict) else {"train": result}
        tables = {part: one.with_format("arrow")[:] for part, one in splits.items()}
        if "train" not in tables:
            raise DataError(f"{name!r} has no split called train. It has: {', '.join(map(str, tables))}.")
        return from_hub(name, tables["train"], next((tables[p] for p in ("test", "validation") if p in tables), None))
    if isinstance(result, (tuple, list)) and len(result) == 2:
        if all(isinstance(part, (tuple, list)) and len(part) == 2 for part in result):
            return from_arrays(name, tuple(result[0]), tuple(result[1]))
        return from_arrays(name, (result[0], result[1]))
    raise DataError(
        f"{name!r} returned a {type(result).__name__}; give a gradveil.data.Dataset, (inputs, labels), "
        "((train inputs, train labels), (test inputs, test labels)), or a data set of Hugging Face's."
    )


def _is_of_hub(value: Any) -> bool:
    """Return whether this is a data set of Hugging Face's library, or a dictionary of its splits."""
    some = next(iter(value.values()), None) if isinstance(value, dict) else value
    return hasattr(some, "with_format") and hasattr(some, "features")


def hold_out(labels: Array, share: float) -> tuple[Array, Array]:
    """Return the indices kept for training and those set aside: a share of each class, shuffled first."""
    if not 0 < share < 1:
        raise DataError(f"test_share={share} must lie between 0 and 1.")
    rng = np.random.default_rng(0)
    if labels.ndim > 1 or labels.dtype != np.int64:  # no classes: all alike
        labels = np.zeros(len(labels), np.int64)
    aside = []
    for its in by_label(labels):
        members = rng.permutation(its)
        aside.append(members[: max(1, round(share * len(members)))] if len(members) > 1 else members[:0])
    chosen = np.sort(np.concatenate(aside))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


def by_label(labels: Array) -> list[Array]:
    """Return the indices of each label's examples, in order, in time that does not grow with the labels."""
    firsts = np.unique(np.sort(labels), return_index=True)[1]
    return np.split(np.argsort(labels, kind="stable"), firsts[1:])


def _inputs(name: str, values: Any) -> Array:
    array = np.asarray(values)
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim == 4 and array.shape[-1] in (1, 3) and array.shape[1] not in (1, 3):
        array = np.moveaxis(array, -1, 1)
    if array.ndim not in (2, 4):
        raise DataError(f"The inputs of {name!r} have shape {array.shape}; give (N, C, H, W), (N, H, W) or (N, D).")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        ids = " Token ids come from text:path=FILE,tokenizer=FOLDER." if array.ndim == 2 else ""
        raise DataError(f"The inputs of {name!r} are {array.dtype}; give uint8, or floats in [0, 1].{ids}")
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise DataError(
            f"The inputs of {name!r} go from {array.min():g} to {array.max():g}; give floats in [0, 1] or uint8. "
            "Normalise inside the model instead (its setting normalize=...)."
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def _labels(name: str, values: Any) -> Array:
    array = np.asarray(values)
    if array.ndim in (1, 2) and np.issubdtype(array.dtype, np.floating):
        if not np.isfinite(array).all():
            raise DataError(f"The labels of {name!r} hold NaN or infinite values.")
        return np.ascontiguousarray(array, np.float32)
    if array.ndim == 2 and np.issubdtype(array.dtype, np.integer) | (array.dtype == bool):
        if array.size and not np.isin(array, (0, 1)).all():
            raise DataError(f"The labels of {name!r}, {array.shape}, must be zeros and ones; give numbers as floats.")
        return array.astype(np.int64)
    if array.ndim not in (1, 3) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"The labels of {name!r} are {array.dtype} of shape {array.shape}; give whole numbers, (N,), zeros and "
            f"ones, (N, K), floats, (N,) or (N, D), or masks of whole numbers, (N, H, W)."
        )
    if array.size and array.min() < 0:
        raise DataError(f"The labels of {name!r} start at {array.min()}; they must start at 0.")
    return array.astype(np.int64)
