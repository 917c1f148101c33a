"""Encoded images (PNG, JPEG, ...) are decoded once, on several threads, and kept as arrays for the next time."""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.format import open_memmap
from PIL import Image

from gradveil.data.base import Array, Dataset, Split
from gradveil.errors import DataError
from gradveil.files import damage_told, locked, refusals_told, sync

Encoded = bytes | Path
_GREY = {"1", "L", "LA", "I", "I;16", "F"}
_CHUNK = 256
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # others run programs, or are no pictures
_PIXELS = 2**26  # of one image
_PIXELS_OF_ALL = 2**34  # of a data set: 16 GiB in grey
_ELSEWHERE = "Set GRADVEIL_CACHE to another folder."


def decode_images(encoded: Sequence[Encoded], size: int | None = None, grey: bool | None = None) -> Array:
    """Return uint8 images (N, C, H, W).

    ``size`` scales every image to a square of that side; without it all must have one size. ``grey`` decides the
    number of channels; ``None`` takes one channel where the first image is grey.
    """
    if not encoded:
        raise DataError("There are no images to decode. Check the folder or the parquet file.")
    first = _open_image(encoded[0])
    num_pixels = (size * size if size else first.width * first.height) * len(encoded)
    if num_pixels > _PIXELS_OF_ALL:
        raise DataError(f"The images have {num_pixels:,} pixels together; the most is {_PIXELS_OF_ALL:,}. Give size=.")
    as_grey = first.mode in _GREY if grey is None else grey
    shape = (size, size) if size else first.size
    out = np.empty((len(encoded), 1 if as_grey else 3, shape[1], shape[0]), np.uint8)
    work = partial(_fill, out, encoded, "L" if as_grey else "RGB", shape, size is not None)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(0, len(encoded), _CHUNK)))
    return out


def _fill(out: Array, encoded: Sequence[Encoded], mode: str, shape: tuple[int, int], resize: bool, start: int) -> None:
    for i in range(start, min(start + _CHUNK, len(encoded))):
        with _damage_told(encoded[i]):
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
    """Return an image whose pixels are not read yet, and not too many."""
    with _damage_told(encoded):
        image = Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded, formats=_FORMATS)
        if image.width * image.height > _PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, and the most is {_PIXELS:,}")
        return image


def _damage_told(encoded: Encoded) -> AbstractContextManager[None]:
    what = "An image in the parquet file" if isinstance(encoded, bytes) else encoded
    return damage_told(what, DataError, "Remove the image or replace it.")


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
    except DataError:  # not there yet, or damaged
        with ExitStack() as held:
            with refusals_told(folder, _ELSEWHERE):
                folder.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(folder.with_name(f".{key}.lock"), wait=True))
            with suppress(DataError):  # another process has stored it meanwhile
                return _open(name, folder)
            decoded = decode()
            with refusals_told(folder, _ELSEWHERE):
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
        (part / "classes.json").write_text(json.dumps(decoded.class_names))
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

    with damage_told(folder, DataError, "Remove it."):
        names = json.loads((folder / "classes.json").read_text())
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            raise ValueError("class names")
        return Dataset(name, split("train"), split("test"), tuple(names))
