"""Encoded images (PNG, JPEG, ...) to uint8 arrays, on several threads: the decoders release the lock."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from gradveil.data.base import Array
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
    first = _open(encoded[0])
    as_grey = first.mode in _GREY if grey is None else grey
    shape = (size, size) if size else first.size
    out = np.empty((len(encoded), 1 if as_grey else 3, shape[1], shape[0]), np.uint8)
    work = partial(_fill, out, encoded, "L" if as_grey else "RGB", shape, size is not None)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(0, len(encoded), _CHUNK)))
    return out


def _fill(out: Array, encoded: Sequence[Encoded], mode: str, shape: tuple[int, int], resize: bool, start: int) -> None:
    for i in range(start, min(start + _CHUNK, len(encoded))):
        image = _open(encoded[i]).convert(mode)
        if resize and image.size != shape:
            image = image.resize(shape, Image.Resampling.BILINEAR)
        if image.size != shape:
            raise DataError(
                f"Image {i} is {image.size[0]}x{image.size[1]} and the first is {shape[0]}x{shape[1]}. "
                "Give size=... to scale all to one size."
            )
        pixels = np.asarray(image)
        out[i] = pixels if mode == "L" else np.moveaxis(pixels, -1, 0)


def _open(encoded: Encoded) -> Image.Image:
    opener: Callable[[], Image.Image] = partial(
        Image.open, io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded
    )
    try:
        return opener()
    except (OSError, ValueError) as error:
        what = "An image in the parquet file" if isinstance(encoded, bytes) else str(encoded)
        raise DataError(f"{what} cannot be decoded ({error}). Remove it or replace it.") from error
