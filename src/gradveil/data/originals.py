"""The files as their makers publish them: MNIST's idx, CIFAR-10's batches, SVHN's mat."""

import gzip
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data.base import Array
from gradveil.errors import DataError

Pair = tuple[Array, Array]  # uint8 images (N, C, H, W), int64 labels (N,)


Files = tuple[Path, ...]


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


def _find_svhn(folder: Path) -> Files | None:
    files = tuple(folder / f"{part}_32x32.mat" for part in ("train", "test"))
    return files if all(path.is_file() for path in files) else None


def _read_svhn(files: Files) -> tuple[Pair, Pair]:
    return _svhn(files[0]), _svhn(files[1])


def _first(*paths: Path) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _idx(path: Path) -> Array:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        dims = raw[3]
        shape = np.frombuffer(raw, ">u4", dims, offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a whole idx file ({error}). Download it again.") from error


def _idx_pair(images: Path, labels: Path) -> Pair:
    return _idx(images)[:, None], _idx(labels).astype(np.int64)


class _ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays and plain containers: a pickle from the network may not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in {"_reconstruct", "ndarray", "dtype"}:
            return super().find_class(module, name)
        if (module, name) == ("_codecs", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a CIFAR-10 batch")


def _cifar_python(path: Path) -> Pair:
    try:
        batch = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        return np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"], np.int64)
    except (OSError, EOFError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is not a CIFAR-10 batch ({error}). Download it again.") from error


def _cifar_bin(path: Path) -> Pair:
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    if raw.size == 0 or raw.size % 3073:
        raise DataError(f"{path} is not a whole CIFAR-10 batch: {raw.size} bytes. Download it again.")
    rows = raw.reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int64)


def _svhn(path: Path) -> Pair:
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        images = np.ascontiguousarray(np.transpose(content["X"], (3, 2, 0, 1)))  # from (H, W, C, N)
        labels = content["y"].reshape(-1).astype(np.int64) % 10  # the files call the digit zero 10
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} is not an SVHN file ({error}). Download it again.") from error
    return images, labels


IDX = Format(_find_idx, _read_idx)  # MNIST and Fashion-MNIST: four files, plain or gzipped
CIFAR = Format(_find_cifar, _read_cifar)  # the Python or the binary version
SVHN = Format(_find_svhn, _read_svhn)  # the cropped digits
