"""Encoded images (PNG, JPEG, ...) are decoded once and kept as arrays for the next time."""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap

from gradveil.data.base import Array, Dataset, Split
from gradveil.errors import DataError
from gradveil.files import locked, sync, wrap_os_errors, wrap_parse_errors

_LOG = logging.getLogger("gradveil")
_ELSEWHERE = "Set GRADVEIL_CACHE to another folder."
FORMAT = 2  # raise when the files' meaning changes


@dataclass(frozen=True)
class Decoded:
    """What is stored: uint8 images (N, C, H, W) and int64 labels (N,) of both splits, class names and levels."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]
    class_names: tuple[str, ...]
    levels: tuple[float, float] | None = None  # of images of more than 8 bits: what became black and white


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
    except DataError:  # not there yet, or damaged
        with ExitStack() as held:
            with wrap_os_errors(folder, _ELSEWHERE):
                folder.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder.with_name(f".{key}.lock"), wait=True))
            with suppress(DataError):  # another process has stored it meanwhile
                return _open(name, folder)
            decoded = decode()
            with wrap_os_errors(folder, _ELSEWHERE):
                _store(folder, decoded)
    return _open(name, folder)


def _store(folder: Path, decoded: Decoded) -> None:
    """Write beside the folder, then rename: another process sees all of it or nothing."""
    for part in folder.parent.glob(f".{folder.name}-*"):  # of one that was killed
        shutil.rmtree(part, ignore_errors=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for split, (images, labels) in (("train", decoded.train), ("test", decoded.test)):
            np.save(part / f"{split}_images.npy", images)
            np.save(part / f"{split}_labels.npy", labels)
        (part / "about.json").write_text(json.dumps({"classes": decoded.class_names, "levels": decoded.levels}))
        for path in part.iterdir():
            sync(path)
        sync(part)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
        sync(folder.parent)
    except OSError:
        if not folder.is_dir():  # another process may have finished first; then its files serve
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _open(name: str, folder: Path) -> Dataset:
    def split(part: str) -> Split:
        images = open_memmap(folder / f"{part}_images.npy", mode="r")
        labels = np.array(open_memmap(folder / f"{part}_labels.npy", mode="r"))
        if images.dtype != np.uint8 or images.ndim != 4 or labels.dtype != np.int64 or labels.ndim != 1:
            raise ValueError(f"images are {images.dtype}, labels {labels.dtype}")
        return Split(images, torch.from_numpy(labels))

    with wrap_parse_errors(folder, DataError, "Remove it."):
        about = json.loads((folder / "about.json").read_text())
        names, levels = about["classes"], about["levels"]
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError("class names")
        if levels is not None:
            low, high = map(float, levels)
            levels = (low, high)
            _LOG.info("images of more than 8 bits: %g is black and %g white, in 256 levels", low, high)
        return Dataset(name, split("train"), split("test"), tuple(names), levels=levels)
