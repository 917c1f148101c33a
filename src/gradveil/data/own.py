"""A user's own arrays as a data set."""

from typing import Any

import numpy as np
import torch

from gradveil.data.base import Array, Dataset, Split
from gradveil.errors import DataError


def from_arrays(
    name: str,
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    class_names: tuple[str, ...] | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """Return a data set from ``(inputs, labels)``; without a test split, a fifth of each class is set aside.

    Inputs are uint8 or floats in [0, 1], shaped (N, C, H, W), (N, H, W), (N, H, W, C) with 1 or 3 channels,
    or (N, D). Labels are whole numbers from 0.
    """
    images, labels = _inputs(name, train[0]), _labels(name, train[1])
    if len(images) != len(labels) or len(images) == 0:
        raise DataError(f"{name!r} has {len(images)} inputs and {len(labels)} labels; give as many, and at least one.")
    if test is None:
        kept, aside = hold_out(labels, test_share)
        pairs = [(images[kept], labels[kept]), (images[aside], labels[aside])]
    else:
        pairs = [(images, labels), (_inputs(name, test[0]), _labels(name, test[1]))]
    splits = [Split(x, torch.from_numpy(y), 255.0 if x.dtype == np.uint8 else 1.0) for x, y in pairs]
    highest = max(int(split.labels.max()) for split in splits if len(split))
    names = class_names or tuple(str(i) for i in range(highest + 1))
    return Dataset(name, splits[0], splits[1], names)


def from_result(name: str, result: Any) -> Dataset:
    """Return the data set that a user's function gave: a ``Dataset``, a pair of arrays, or a pair of pairs."""
    if isinstance(result, Dataset):
        return result
    if isinstance(result, (tuple, list)) and len(result) == 2:
        if all(isinstance(part, (tuple, list)) and len(part) == 2 for part in result):
            return from_arrays(name, tuple(result[0]), tuple(result[1]))
        return from_arrays(name, (result[0], result[1]))
    raise DataError(
        f"{name!r} returned a {type(result).__name__}; give a gradveil.data.Dataset, (inputs, labels), or "
        "((train inputs, train labels), (test inputs, test labels))."
    )


def hold_out(labels: Array, share: float, seed: int = 0) -> tuple[Array, Array]:
    """Return the indices kept for training and those set aside: a share of each class, shuffled first."""
    if not 0 < share < 1:
        raise DataError(f"test_share={share} must lie between 0 and 1.")
    rng = np.random.default_rng(seed)
    aside = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        aside.append(members[: max(1, round(share * len(members)))] if len(members) > 1 else members[:0])
    chosen = np.sort(np.concatenate(aside))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


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
        raise DataError(f"The inputs of {name!r} are {array.dtype}; give uint8, or floats in [0, 1].")
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise DataError(
            f"The inputs of {name!r} go from {array.min():g} to {array.max():g}; give floats in [0, 1] or uint8. "
            "Normalise inside the model instead (its setting normalize=...)."
        )
    return np.ascontiguousarray(array, dtype=np.float32)


def _labels(name: str, values: Any) -> Array:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"The labels of {name!r} are {array.dtype} of shape {array.shape}; give whole numbers, (N,).")
    if array.size and array.min() < 0:
        raise DataError(f"The labels of {name!r} start at {array.min()}; they must start at 0.")
    return array.astype(np.int64)
