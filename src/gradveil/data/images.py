"""Encoded images (PNG, JPEG, ...) decoded, once: they are kept as arrays for the next time."""

import hashlib
import io
import json
import logging
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
from gradveil.errors import DataError, MissingExtraError
from gradveil.files import cache_folder, locked, sync, wrap_os_errors, wrap_parse_errors

Encoded = bytes | Path
_GREY = {"1", "L", "LA"}
_DEEP = {"I;16": "whole", "I;16L": "whole", "I;16B": "whole", "I;16N": "whole", "I": "whole", "F": "real"}
_CHUNK = 256
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # others run programs, or are no pictures
_PIXELS = 2**26  # of one image
_PIXELS_OF_ALL = 2**34  # of a data set: 16 GiB in grey
DICOM = (".dcm", ".dicom")
_WHITE_IS_ZERO, _PHOTOMETRIC = 0, 262  # of TIFF


Levels = tuple[float, float]  # the values that become black and white, of a set of grey images of more than 8 bits


def levels_of(encoded: Sequence[Encoded]) -> Levels | None:
    """Return the range of the images of a set; None where they have eight bits. Real numbers in [0, 1] keep theirs."""
    kinds = [_kind(_open_image(one)) for one in encoded[:1]]
    if not kinds or not kinds[0]:
        return None
    work = partial(_range, encoded, kinds[0])
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        ends = list(pool.map(work, range(len(encoded))))
    low, high = min(low for low, _ in ends), max(high for _, high in ends)
    if kinds[0] == "real" and low >= 0 and high <= 1:
        return 0.0, 1.0
    if low == high:
        raise DataError(
            f"Every pixel of the {len(encoded):,} images is {low:g}: there is nothing to see, nor to learn."
        )
    return low, high


def _range(encoded: Sequence[Encoded], kind: str, i: int) -> tuple[float, float]:
    with _damage_told(encoded[i]):
        image = _open_image(encoded[i])
        if (found := _kind(image)) != kind:
            raise ValueError(f"it has {_words(found)}, and the first image {_words(kind)}: give all in one depth")
        values = np.asarray(image)
        low, high = float(values.min()), float(values.max())
        if not (np.isfinite(low) and np.isfinite(high)):
            raise ValueError("it holds NaN or infinite values")
        return low, high


def decode_images(
    encoded: Sequence[Encoded], size: int | None = None, grey: bool | None = None, levels: Levels | None = None
) -> Array:
    """Return uint8 images (N, C, H, W).

    ``size`` scales every image to a square of that side; without it all must have one size. ``grey`` decides the
    number of channels; ``None`` takes one channel where the first image is grey. Images of more than eight bits need
    the ``levels`` of their set.
    """
    if not encoded:
        raise DataError("There are no images to decode. Check the folder or the parquet file.")
    first = _open_image(encoded[0])
    num_pixels = (size * size if size else first.width * first.height) * len(encoded)
    if num_pixels > _PIXELS_OF_ALL:
        raise DataError(f"The images have {num_pixels:,} pixels together; the most is {_PIXELS_OF_ALL:,}. Give size=.")
    as_grey = first.mode in _GREY or bool(_kind(first)) if grey is None else grey
    shape = (size, size) if size else first.size
    out = np.empty((len(encoded), 1 if as_grey else 3, shape[1], shape[0]), np.uint8)
    work = partial(_fill, out, encoded, "L" if as_grey else "RGB", shape, size is not None, levels)
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(work, range(0, len(encoded), _CHUNK)))
    return out


def _fill(
    out: Array,
    encoded: Sequence[Encoded],
    mode: str,
    shape: tuple[int, int],
    resize: bool,
    levels: Levels | None,
    start: int,
) -> None:
    for i in range(start, min(start + _CHUNK, len(encoded))):
        with _damage_told(encoded[i]):
            image = _open_image(encoded[i])
            deep = _kind(image)
            if bool(deep) != (levels is not None):
                raise ValueError(f"it has {_words(deep)}, and that of the other images is another depth")
            image = Image.fromarray(np.asarray(image).astype(np.float32)) if deep else image.convert(mode)
            if resize and image.size != shape:
                image = image.resize(shape, Image.Resampling.BILINEAR)
        if image.size != shape:
            raise DataError(
                f"Image {i} is {image.size[0]}x{image.size[1]} and the first is {shape[0]}x{shape[1]}. "
                "Give size=... to scale all to one size."
            )
        pixels = np.asarray(image)
        if levels is not None:
            share = (pixels.astype(np.float64) - levels[0]) / (levels[1] - levels[0])
            pixels = np.rint(255 * share.clip(0, 1)).astype(np.uint8)
        out[i] = pixels if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _open_image(encoded: Encoded) -> Image.Image:
    """Return an image whose pixels are not read yet, not too many, and of a kind that is read right."""
    with _damage_told(encoded):
        if isinstance(encoded, Path) and encoded.suffix.lower() in DICOM:
            return _open_dicom(encoded)
        if isinstance(encoded, Path) and not encoded.is_file():
            raise ValueError("it is no plain file")
        image = Image.open(io.BytesIO(encoded) if isinstance(encoded, bytes) else encoded, formats=_FORMATS)
        if image.width * image.height > _PIXELS:
            raise ValueError(f"{image.width} x {image.height} pixels, and the most is {_PIXELS:,}")
        if not _kind(image) and image.format in ("PNG", "TIFF") and any(";16" in str(tile[3]) for tile in image.tile):
            raise ValueError("its colours have 16 bits, of which 8 would be cut off: save it with 8, or as grey")
        if image.format == "TIFF":
            if _kind(image) and image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:  # type: ignore[attr-defined]
                raise ValueError("white is 0 in it: save it with black as 0")
            if image.n_frames > 1:  # type: ignore[attr-defined]
                raise ValueError(f"it has {image.n_frames} pages: save each as a file")  # type: ignore[attr-defined]
        return image


def _open_dicom(path: Path) -> Image.Image:
    """Return the one picture of a DICOM file, grey, in the units that the file says, with black as its lowest value."""
    try:
        import pydicom
        from pydicom.pixels import apply_rescale
    except ImportError as error:
        raise MissingExtraError("Reading DICOM files", "dicom") from error
    file = pydicom.dcmread(path)
    if int(file.get("NumberOfFrames", 1)) > 1 or int(file.get("SamplesPerPixel", 1)) > 1:
        raise ValueError("it has several frames, or colours: save each picture as one grey file")
    if int(file.Rows) * int(file.Columns) > _PIXELS:
        raise ValueError(f"{file.Rows} x {file.Columns} pixels, and the most is {_PIXELS:,}")
    values = np.asarray(apply_rescale(file.pixel_array, file), np.float64)
    if str(file.get("PhotometricInterpretation", "")) == "MONOCHROME1":  # its lowest value is white
        values = values.min() + values.max() - values
    if (values == np.round(values)).all() and np.abs(values).max(initial=0) < 2**31:
        return Image.fromarray(values.astype(np.int32))
    return Image.fromarray(values.astype(np.float32))


def _kind(image: Image.Image) -> str:
    """Return of what numbers an image of more than eight bits is; empty for all others."""
    return _DEEP.get(image.mode, "")


def _words(kind: str) -> str:
    return {"": "8 bits", "whole": "whole numbers of more than 8 bits", "real": "real numbers"}[kind]


def _damage_told(encoded: Encoded) -> AbstractContextManager[None]:
    what = "An image in the parquet file" if isinstance(encoded, bytes) else encoded
    return wrap_parse_errors(what, DataError, "Remove the image or replace it.")


_LOG = logging.getLogger("gradveil")
_ELSEWHERE = "Set GRADVEIL_CACHE to another folder."
FORMAT = 2  # raise when the files' meaning changes


@dataclass(frozen=True)
class Decoded:
    """What is stored: uint8 images (N, C, H, W) and int64 labels (N,) of both splits, class names and levels."""

    train: tuple[Array, Array]
    test: tuple[Array, Array]
    class_names: tuple[str, ...]
    levels: Levels | None = None


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
