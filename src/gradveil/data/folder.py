"""Your own images: a folder for each class; and images or texts of the Hugging Face hub, as files or as objects."""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from gradveil.data.base import DATASETS, Array, Dataset, Source, Split, hold_out, inside, numbered
from gradveil.data.images import Decoded, Encoded, cached, decode_images, key_of, levels_of
from gradveil.errors import DataError
from gradveil.files import wrap_parse_errors
from gradveil.imports import Later
from gradveil.ranges import Between, Range

pyarrow, parquet = Later("pyarrow"), Later("pyarrow.parquet")

_ROWS, _UNPACKED = 10**8, 2**34  # of a parquet file: rows, and bytes
_SMALL, _TIMES = 2**29, 100  # what any file may unpack to, in bytes, and a larger one: so many times its size
pc, types = Later("pyarrow.compute"), Later("pyarrow.types")
_PIECE = 2**27  # bytes that are unpacked at once, at most
_DICTIONARY, _BATCH = 2, 3  # kinds of Arrow's messages
_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
_TEXT_NAMES = ("text", "sentence", "content", "document")


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return ``train.parquet``, ``train-00000-of-00001.parquet``, ... in a folder or one level below."""
    name = re.compile(rf"{split}(-\d+-of-\d+)?(-[0-9a-f]+)?\.parquet")
    for pattern in ("*.parquet", "*/*.parquet"):
        found = sorted(path for path in folder.glob(pattern) if name.fullmatch(path.name))
        if found:
            first = found[0].parent
            return [path for path in found if path.parent == first]
    return []


def saved_files(folder: Path, split: str) -> list[Path]:
    """Return a split's files as ``save_to_disk`` of Hugging Face datasets writes them; without splits, all of them."""
    whole = [] if (folder / "dataset_dict.json").is_file() or split != "train" else sorted(folder.glob("data-*.arrow"))
    return whole or sorted((folder / split).glob("data-*.arrow"))


def read_parquet(files: Sequence[Path]) -> Any:
    """Return the files, parquet or those of ``save_to_disk``, as one pyarrow table."""
    with wrap_parse_errors(", ".join(map(str, files)), DataError, "Download it again."):
        if not all(path.is_file() for path in files):
            raise ValueError("it is no plain file")
        found = [(_read_arrow if path.suffix == ".arrow" else _read_parquet)(path) for path in files]
        for path, table in zip(files, found, strict=True):
            if (size := sum(map(_unpacked, table.columns))) > (most := _most(path)):
                raise ValueError(f"it unpacks to {size:,} bytes, and the most is {most:,}")
        return pyarrow.concat_tables(found)


def _most(path: Path) -> int:
    """Return the bytes that a file may unpack to."""
    return min(_UNPACKED, max(_SMALL, _TIMES * path.stat().st_size))


def _unpacked(column: Any) -> int:
    """Return the bytes of a column as values, of which one in a dictionary may stand in any number of rows."""
    texts = [
        pc.sum(pc.take(pc.binary_length(part.dictionary), part.indices)).as_py() or 0
        for part in (column.chunks if types.is_dictionary(column.type) else ())
        if not types.is_primitive(part.type.value_type)
    ]
    found: int = max(8 * len(column), column.nbytes, sum(texts))
    return found


def _read_arrow(path: Path) -> Any:
    with pyarrow.memory_map(str(path)) as file:
        for message in pyarrow.ipc.MessageReader.open_stream(file):
            if _is_packed(message.metadata.to_pybytes()):
                raise ValueError("it is compressed, and nothing says how large it is: save it without, or as parquet")
        file.seek(0)
        found = pyarrow.ipc.open_stream(file).read_all()
    found.validate(full=True)  # pyarrow itself goes where its numbers say
    return found


def _is_packed(about: bytes) -> bool:
    """Return whether a message of Arrow's holds compressed rows: by the fourth field of its table RecordBatch."""

    def at(place: int, kind: str = "<i") -> int:
        found: int = struct.unpack_from(kind, about, place)[0]
        return found

    def field(table: int, number: int) -> int:
        shape = table - at(table)
        offset = at(shape + 4 + 2 * number, "<H") if 4 + 2 * number < at(shape, "<H") else 0
        return table + offset if offset else 0

    def inner(table: int, number: int) -> int:
        return (place := field(table, number)) and place + at(place)

    message = at(0)
    kind, rows = about[field(message, 1)] if field(message, 1) else 0, inner(message, 2)
    rows = inner(rows, 1) if kind == _DICTIONARY else rows
    return kind in (_DICTIONARY, _BATCH) and bool(rows) and bool(field(rows, 3))


def _read_parquet(path: Path) -> Any:
    """Return a file as a table, read piece by piece: a few bytes can stand for any number of long texts."""
    with parquet.ParquetFile(path) as file:
        about = file.metadata
        groups = [about.row_group(i) for i in range(about.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(about.num_columns)]
        size = sum(group.total_byte_size for group in groups)
        most = _most(path)
        longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)  # that a value can be
        numbers = 8 * sum(chunk.num_values for chunk in chunks)
        if about.num_rows > _ROWS or not 0 <= size <= most or not 0 <= numbers <= most or longest < 0:
            raise ValueError(f"{about.num_rows:,} rows, {size:,} bytes; the most is {_ROWS:,} and {most:,}")
        held, parts = 0, []
        for part in file.iter_batches(max(1, min(2**16, _PIECE // max(longest, 1)))):
            held += part.nbytes
            if held > most:
                raise ValueError(f"it unpacks to more than {most:,} bytes")
            parts.append(part)
        return pyarrow.Table.from_batches(parts, file.schema_arrow)


def encoded_table(table: Any, image: str | None, label: str | None) -> tuple[list[bytes], Array]:
    """Return the encoded images and int64 labels (N,) of a table."""
    with wrap_parse_errors("The parquet file", DataError, "Write it again."):
        return _columns(table, image, label)


def _columns(table: Any, image: str | None, label: str | None) -> tuple[list[bytes], Array]:
    image = _column(table, "image", image, _IMAGE_NAMES)
    label = _column(table, "label", label, _LABEL_NAMES)
    images, labels = table.column(image).combine_chunks(), table.column(label).combine_chunks()
    if images.null_count or labels.null_count:
        raise DataError(f"Columns {image!r} and {label!r} have empty cells. Remove those rows.")
    encoded = images.field("bytes") if str(images.type).startswith("struct") else images
    values = labels.to_numpy(zero_copy_only=False)
    if not np.issubdtype(values.dtype, np.integer):
        raise DataError(f"Column {label!r} holds {labels.type}; labels must be whole numbers from 0.")
    if str(encoded.type) not in ("binary", "large_binary") or encoded.null_count:
        raise DataError(f"Column {image!r} holds {images.type}; it must hold the bytes of image files in every row.")
    return encoded.to_pylist(), values.astype(np.int64)


def class_names(table: Any, label: str | None = None) -> tuple[str, ...] | None:
    """Return the names of the classes that a Hugging Face file carries in its metadata, where it does."""
    raw = (table.schema.metadata or {}).get(b"huggingface")
    if not raw:
        return None
    with wrap_parse_errors(
        "The parquet file's metadata 'huggingface'", DataError, "Write it again, or leave them out."
    ):
        features = json.loads(raw).get("info", {}).get("features", {})
        found = features.get(_column(table, "label", label, _LABEL_NAMES), {})
        names = found.get("names") if isinstance(found, dict) else None
        if names and not all(isinstance(name, str) for name in names):
            raise ValueError("the names of classes are no texts")
        return tuple(names) if names else None


def _column(table: Any, what: str, asked: str | None, usual: tuple[str, ...]) -> str:
    for name in (asked,) if asked else usual:
        if name in table.column_names:
            return name
    raise DataError(
        f"The parquet file has no {what} column {asked or ' / '.join(usual)!r}. It has: "
        f"{', '.join(table.column_names)}. Give {what}=... with one of these."
    )


def texts_of(table: Any) -> str | None:
    """Return the column of texts of a table that has no column of images."""
    if any(name in table.column_names for name in _IMAGE_NAMES):
        return None
    return next((name for name in _TEXT_NAMES if name in table.column_names), None)


def from_hub(name: str, train: Any, test: Any = None, settings: "Folder | None" = None) -> Dataset:
    """Return the data set of one or two pyarrow tables as the Hugging Face hub has them: of images, or of texts."""
    from gradveil.data.text import LARGEST_OF_ALL, from_texts

    own, text = settings or Folder(), texts_of(train)
    if text is None and not own.image and not any(image in train.column_names for image in _IMAGE_NAMES):
        raise DataError(
            f"{name} has neither images nor texts; its columns are {', '.join(train.column_names[:12])}. If it is a "
            f"table, give a function that returns it as a data frame: --dataset my_module:frame --target COLUMN."
        )
    if text is None:
        found = own.decoded_tables(train, test)
        kept, aside = (Split(images, torch.from_numpy(labels)) for images, labels in (found.train, found.test))
        return Dataset(name, kept, aside, found.class_names, levels=found.levels)
    tables = [train] if test is None else [train, test]
    label = next((n for n in (own.label, *_LABEL_NAMES) if n in train.column_names), None)
    for column in (table.column(text) for table in tables):
        if not types.is_string(column.type) and not types.is_large_string(column.type):
            raise DataError(f"Column {text!r} of {name} holds {column.type}, which is no text. Write it as one.")
        if column.nbytes > LARGEST_OF_ALL:
            raise DataError(f"Column {text!r} of {name} holds {column.nbytes:,} bytes; the most is {LARGEST_OF_ALL:,}.")
    texts = [one or "" for table in tables for one in table.column(text).to_pylist()]
    if label is None:
        return from_texts(name, texts, None, test_share=own.test_share)
    names, values = class_names(train, label), [v for table in tables for v in table.column(label).to_pylist()]
    named = dict(enumerate(names or ()))
    labels = [named.get(v, str(v)) for v in values]
    return from_texts(name, texts, labels, test_share=own.test_share, test_from=None if test is None else len(train))


_SUFFIXES = {".dcm", ".dicom", ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
_TEST_NAMES = ("test", "val", "valid", "validation")
Files = list[tuple[Path, int]]  # an image and its class
Part = tuple[Sequence[Encoded], Array]  # images and their classes (N,)


@DATASETS.register("folder")
@dataclass(frozen=True)
class Folder(Source):
    """Your own images: ``folder:path=photos,size=32``.

    The directory holds one folder per class, or ``train`` and ``test`` with one folder per class each, or a data set of
    the Hugging Face hub, images or texts: parquet files, or what ``save_to_disk`` wrote. DICOM files are read where
    pydicom is installed. Without a test split a share of each class is set aside.
    """

    path: str | None = None  # None: the data folder itself
    size: Annotated[int, Range(1, 4096)] | None = None  # scale every image to a square of this side
    grey: bool | None = None  # None: as the first image is
    test_share: Between = 0.2
    image: str | None = None  # the parquet column of images; None: image or img
    label: str | None = None  # the parquet column of labels; None: label, labels, ...

    def load(self, data: Path | None) -> Dataset:
        root = self._root(data)
        train = parquet_files(root, "train") or sorted(root.glob("*.parquet")) or saved_files(root, "train")
        if train:
            find = parquet_files if train[0].suffix == ".parquet" else saved_files
            test = next(filter(None, (find(root, part) for part in _TEST_NAMES)), [])
            files = [*train, *test]
            table = read_parquet(train)
            others = partial(read_parquet, test) if test else lambda: None
            if texts_of(table):
                return from_hub(root.name, table, others(), self)
            return cached("folder", key_of("folder", files, self), lambda: self.decoded_tables(table, others()))
        names, *parts = _class_folders(root)
        key = key_of("folder", [path for part in parts for path, _ in part], self)
        return cached("folder", key, lambda: self._decoded(names, *map(_paths_and_classes, filter(None, parts))))

    def _root(self, data: Path | None) -> Path:
        root = inside(data, self.path) if self.path else data
        if root is None:
            raise DataError("The dataset 'folder' needs a directory: give folder:path=DIRECTORY or --data DIRECTORY.")
        if not root.is_dir():
            raise DataError(f"{str(root)!r} is not a directory. Give folder:path=DIRECTORY.")
        return root

    def decoded_tables(self, table: Any, test: Any) -> Decoded:
        """Return the images of one or two tables."""
        parts = [encoded_table(part, self.image, self.label) for part in (table, test) if part is not None]
        names = class_names(table, self.label) or numbered(1 + max(int(labels.max(initial=0)) for _, labels in parts))
        return self._decoded(names, *parts)

    def _decoded(self, names: tuple[str, ...], train: Part, test: Part | None = None) -> Decoded:
        levels = levels_of([*train[0], *(test[0] if test else ())])
        images, labels = decode_images(train[0], self.size, self.grey, levels), train[1]
        if test:
            others = decode_images(test[0], self.size, images.shape[1] == 1, levels)
            return Decoded((images, labels), (others, test[1]), names, levels)
        kept, aside = hold_out(labels, self.test_share)
        return Decoded((images[kept], labels[kept]), (images[aside], labels[aside]), names, levels)


def _paths_and_classes(files: Files) -> Part:
    return [path for path, _ in files], np.array([label for _, label in files], np.int64)


def _class_folders(root: Path) -> tuple[tuple[str, ...], Files, Files]:
    train_root = root / "train" if (root / "train").is_dir() else root
    test_root = next((root / n for n in _TEST_NAMES if train_root != root and (root / n).is_dir()), None)
    names = tuple(sorted(p.name for p in train_root.iterdir() if p.is_dir() and not p.name.startswith(".")))
    train = _images(train_root, names)
    if not train:
        raise DataError(
            f"{root} holds no images. It needs one folder of images per class, train/ and test/ with such folders, or "
            "train.parquet with the columns image and label."
        )
    return names, train, _images(test_root, names) if test_root else []


def _images(root: Path, names: tuple[str, ...]) -> Files:
    try:
        return [
            (path, label)
            for label, name in enumerate(names)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in _SUFFIXES
        ]
    except OSError as error:  # a part of it went away meanwhile, as processes do under /proc
        raise DataError(
            f"{root} cannot be listed ({error.strerror}: {error.filename}). Give a folder of images."
        ) from error
