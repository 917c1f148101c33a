"""Decoded once, memory-mapped afterwards: arrays on disk, keyed by where they came from."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradveil.data.base import Array, Dataset, Split

FORMAT = 1  # raise when the files' meaning changes


@dataclass(frozen=True)
class Decoded:
    """What is stored: uint8 images (N, C, H, W) and int64 labels (N,) of both splits, and the class names."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]
    class_names: tuple[str, ...]


def cache_folder() -> Path:
    """Return ``GRADVEIL_CACHE``, else ``~/.cache/gradveil``."""
    return Path(os.environ.get("GRADVEIL_CACHE") or Path.home() / ".cache" / "gradveil").expanduser()


def key_of(name: str, files: Sequence[Path], *settings: Any) -> str:
    """Return a key that changes with any file's path, time or size, and with the settings."""
    stats = [(str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(files)]
    digest = hashlib.sha256(json.dumps([FORMAT, name, stats, list(settings)], default=str).encode()).hexdigest()
    return f"{name}-{digest[:20]}"


def cached(name: str, key: str, decode: Callable[[], Decoded]) -> Dataset:
    """Return the data set stored under a key, decoding and storing it first where it is not there yet."""
    folder = cache_folder() / key
    try:
        return _open(name, folder)
    except (OSError, EOFError, ValueError):  # not there yet, or broken
        _store(folder, decode())
    return _open(name, folder)


def _store(folder: Path, decoded: Decoded) -> None:
    """Write beside the folder, then rename: another process sees all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for split, (images, labels) in (("train", decoded.train), ("test", decoded.test)):
            np.save(part / f"{split}_images.npy", images)
            np.save(part / f"{split}_labels.npy", labels)
        (part / "classes.json").write_text(json.dumps(decoded.class_names))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except OSError:
        if not folder.is_dir():  # another process may have finished first; then its files serve
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _open(name: str, folder: Path) -> Dataset:
    def split(part: str) -> Split:
        images = np.load(folder / f"{part}_images.npy", mmap_mode="r")
        return Split(images, torch.from_numpy(np.load(folder / f"{part}_labels.npy")))

    names = tuple(json.loads((folder / "classes.json").read_text()))
    return Dataset(name, split("train"), split("test"), names)
