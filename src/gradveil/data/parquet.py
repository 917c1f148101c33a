"""Parquet in the Hugging Face layout: a column of encoded images and a column of labels."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradveil.data.base import Array
from gradveil.data.decode import decode_images
from gradveil.errors import DataError

_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return ``train.parquet``, ``train-00000-of-00001.parquet``, ... in a folder or one level below."""
    name = re.compile(rf"{split}(-\d+-of-\d+)?(-[0-9a-f]+)?\.parquet")
    for pattern in ("*.parquet", "*/*.parquet"):
        found = sorted(path for path in folder.glob(pattern) if name.fullmatch(path.name))
        if found:
            first = found[0].parent
            return [path for path in found if path.parent == first]
    return []


def read_parquet(files: Sequence[Path]) -> Any:
    """Return the files as one pyarrow table."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.concat_tables([pyarrow.parquet.read_table(path) for path in files])
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"Cannot read {', '.join(map(str, files))} ({reason}). Download it again.") from error


def decode_table(
    table: Any,
    image: str | None = None,
    label: str | None = None,
    size: int | None = None,
    grey: bool | None = None,
) -> tuple[Array, Array]:
    """Return uint8 images (N, C, H, W) and int64 labels (N,) from a table."""
    image = _column(table, "image", image, _IMAGE_NAMES)
    label = _column(table, "label", label, _LABEL_NAMES)
    images, labels = table.column(image).combine_chunks(), table.column(label).combine_chunks()
    if images.null_count or labels.null_count:
        raise DataError(f"Columns {image!r} and {label!r} have empty cells. Remove those rows.")
    encoded = images.field("bytes") if str(images.type).startswith("struct") else images
    values = labels.to_numpy(zero_copy_only=False)
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"Column {label!r} holds {labels.type}; labels must be whole numbers from 0.")
    return decode_images(encoded.to_pylist(), size, grey), values.astype(np.int64)


def class_names(table: Any, label: str | None = None) -> tuple[str, ...] | None:
    """Return the names of the classes that a Hugging Face file carries in its metadata, where it does."""
    raw = (table.schema.metadata or {}).get(b"huggingface")
    if not raw:
        return None
    features = json.loads(raw).get("info", {}).get("features", {})
    found = features.get(_column(table, "label", label, _LABEL_NAMES), {})
    names = found.get("names") if isinstance(found, dict) else None
    return tuple(names) if names else None


def _column(table: Any, what: str, asked: str | None, usual: tuple[str, ...]) -> str:
    for name in (asked,) if asked else usual:
        if name in table.column_names:
            return name
    raise DataError(
        f"The parquet file has no {what} column {asked or ' / '.join(usual)!r}. It has: "
        f"{', '.join(table.column_names)}. Give {what}=... with one of these."
    )
