"""Encoded images (PNG, JPEG, ...) are decoded once, on several threads, and kept as arrays for the next time."""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gradveil.data.base import Array, Dataset, Split
from gradveil.errors import DataError

Encoded = bytes | Path
_GREY = {"1", "L", "LA", "I", "I;16", "F"}
_CHUNK = 256


def decode_images(encoded: Sequence[Encoded], size: int | None = None, grey: bool | None = None) -> Array:
    """Return uint8 images (N, C, H, W).

    ``size`` scales every image to a square of that side; without it all must have one size. ``grey`` decides the
    number of channels; ``None`` takes one channel where the first image is grey.
    """
    if not encoded:
        raise DataError("There are no images to decode. Check the folder or the parquet file.")
    first = _open_image(encoded[0])
    as_grey = first.mode in _GREY if grey is None else grey
    shape = (size, size) if size else first.size
    out = np.empty((len(encoded), 1 if as_grey else 3, shape[1], shape[0]), np.uint8)
    work = partial(_fill, out, encoded, "L" if as_grey else "RGB", shape, size is not None)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(0, len(encoded), _CHUNK)))
    return out


def _fill(out: Array, encoded: Sequence[Encoded], mode: str, shape: tuple[int, int], resize: bool, start: int) -> None:
    for i in range(start, min(start + _CHUNK, len(encoded))):
        image = _open_image(encoded[i]).convert(mode)
        if resize and image.size != shape:
            image = image.resize(shape, Image.Resampling.BILINEAR)
        if image.size != shape:
            raise DataError(
                f"Image {i} is {image.size[0]}x{image.size[1]} and the first is {shape[0]}x{shape[1]}. "
                "Give size=... to scale all to one size."
            )
        pixels = np.asarray(image)
        out[i] = pixels if mode == "L" else np.moveaxis(pixels, -1, 0)


def _open_image(encoded: Encoded) -> Image.Image:
    opener: Callable[[], Image.Image] = partial(
        Image.open, io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    )
    try:
        return opener()
    except (OSError, ValueError) as error:
        what = "An image in the parquet file" if isinstance(encoded, bytes) else str(encoded)
        raise DataError(f"{what} cannot be decoded ({error}). Remove it or replace it.") from error


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
