"""The files as their makers publish them: MNIST's idx, and CIFAR-10's batches, read without ``pickle``.

A batch is a text in the pickle language. Nothing of it is carried out: its words are gone through once, and those that
hold the pixels and the labels are kept.
"""

import gzip
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path

import numpy as np

from gradveil.data.base import Array
from gradveil.errors import DataError
from gradveil.files import read_whole, wrap_parse_errors

_WORDS = 10**6  # of a file: a batch of 10,000 images has 60,000
_KEYS = (b"data", b"labels", b"batch_label", b"filenames")
_WHOLE = ("BININT", "BININT1", "BININT2")  # words of a whole number
_PIXELS = 3 * 32 * 32


def read_batch(content: bytes) -> tuple[Array, Array]:
    """Return the pixels (N, 3072) and the labels (N,) of a batch that Python 2 wrote, or 3 (protocols 2 to 4)."""
    labels: list[int] = []
    key, pixels, by_columns = b"", b"", False
    for word, given, _ in islice(pickletools.genops(content), _WORDS):
        text = given.encode("latin-1") if isinstance(given, str) else given
        if word.name in ("NEWTRUE", "NEWFALSE"):
            by_columns = word.name == "NEWTRUE"  # of an array the last before its bytes
        elif isinstance(text, bytes) and text in _KEYS:
            key = text
        elif key == b"labels" and word.name in _WHOLE:
            labels.append(int(given or 0))
        elif key == b"data" and isinstance(text, bytes) and len(text) >= _PIXELS:
            pixels = text
        if word.name == "STOP":
            break
    else:
        raise ValueError("it has no end")
    if not labels or by_columns or len(pixels) != _PIXELS * len(labels) or not all(0 <= one < 10 for one in labels):
        raise ValueError("it holds no bytes of images row by row under 'data', or no list of as many labels, 0 to 9")
    return np.frombuffer(pixels, np.uint8).reshape(-1, _PIXELS), np.array(labels, np.int64)


Pair = tuple[Array, Array]  # uint8 images (N, C, H, W), int64 labels (N,)


Files = tuple[Path, ...]
LARGEST = 2**28  # bytes of a file, and of what it unpacks to: the largest of these sets has 225 million
_AGAIN = "It is not a whole {} file: download it again."


@dataclass(frozen=True)
class Format:
    """How to find a set's files in a folder, and how to read them."""

    find: Callable[[Path], Files | None]
    read: Callable[[Files], tuple[Pair, Pair]]  # train, test


def _find_idx(folder: Path) -> Files | None:
    stems = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    for place in (folder, folder / "raw"):
        found = [_first(place / stem, place / f"{stem}.gz", place / stem.replace("-idx", ".idx")) for stem in stems]
        if all(found):
            return tuple(path for path in found if path)
    return None


def _read_idx(files: Files) -> tuple[Pair, Pair]:
    return _idx_pair(files[0], files[1]), _idx_pair(files[2], files[3])


def _find_cifar(folder: Path) -> Files | None:
    stems = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    for sub, suffix in (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin")):
        for place in (folder, folder / sub):
            files = tuple(place / f"{stem}{suffix}" for stem in stems)
            if all(path.is_file() for path in files):
                return files
    return None


def _read_cifar(files: Files) -> tuple[Pair, Pair]:
    read = _cifar_bin if files[0].suffix == ".bin" else _cifar_python
    pairs = [read(path) for path in files[:-1]]
    train = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    return train, read(files[-1])


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _idx(path: Path, dims: int) -> Array:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        start = file.read(4 + 4 * dims)
        if start[:4] != bytes((0, 0, 8, dims)):
            raise ValueError(f"it begins with {start[:4].hex()}")
        shape = np.frombuffer(start, ">u4", dims, offset=4).tolist()
        if prod(shape) > LARGEST:
            raise ValueError(f"it declares the shape {shape}")
        return np.frombuffer(file.read(prod(shape) + 1), np.uint8).reshape(shape)  # no less, no more


def _idx_pair(images: Path, labels: Path) -> Pair:
    with wrap_parse_errors(images, DataError, _AGAIN.format("idx")):
        pixels = _idx(images, 3)[:, None]
    with wrap_parse_errors(labels, DataError, _AGAIN.format("idx")):
        return pixels, _idx(labels, 1).astype(np.int64)


def _cifar_python(path: Path) -> Pair:
    with wrap_parse_errors(path, DataError, _AGAIN.format("CIFAR-10")):
        images, labels = read_batch(read_whole(path, LARGEST))
    return images.reshape(-1, 3, 32, 32), labels


def _cifar_bin(path: Path) -> Pair:
    with wrap_parse_errors(path, DataError, _AGAIN.format("CIFAR-10")):
        rows = np.frombuffer(read_whole(path, LARGEST), np.uint8).reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


IDX = Format(_find_idx, _read_idx)  # MNIST and Fashion-MNIST: four files, plain or gzipped
CIFAR = Format(_find_cifar, _read_cifar)  # the Python or the binary version
