"""The files of a run folder, read: what was damaged or changed by hand is one line."""

import contextlib
import io
import json
import zipfile
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradveil.auditing.settings import parse
from gradveil.errors import GradveilError
from gradveil.files import read_whole, wrap_parse_errors

Row = dict[str, Any]
_LARGEST = 2**30  # bytes of an archive of images, and of what it unpacks to
_TEXT = 2**27  # bytes of a text, whose values are objects
CHANGED = "It was changed by hand, or damaged: take it from a copy, or choose another --out."


class FolderError(GradveilError):
    """A run folder cannot be read or continued, or another process is at work in it."""


def read_text(path: Path) -> str:
    """Return the text of a file."""
    with wrap_parse_errors(path, FolderError, CHANGED):
        return read_whole(path, _TEXT).decode()


def read_table(path: Path) -> dict[str, Any]:
    """Return the table of a TOML file."""
    with wrap_parse_errors(path, FolderError, CHANGED):
        return parse(read_text(path))


def read_rows(path: Path, needed: Mapping[str, type]) -> list[Row]:
    """Return the rows of a file, each with what it needs; a last line that a kill cut off is dropped."""
    *lines, last = read_text(path).split("\n") if path.exists() else [""]
    rows = []
    for number, line in enumerate(lines, start=1):
        with wrap_parse_errors(f"Line {number} of {path}", FolderError, CHANGED):
            rows.append(_row(line, needed))
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # nothing, or torn
        rows.append(_row(last, needed))
    return rows


def _row(line: str, needed: Mapping[str, type]) -> Row:
    row: Row = json.loads(line, parse_constant=_no_number)
    for name, kind in needed.items():
        if not isinstance(row[name], kind) or isinstance(row[name], bool):
            raise ValueError(f"it needs {', '.join(needed)}")
    return row


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz file by name."""
    with (
        wrap_parse_errors(path, FolderError, f"{CHANGED} Remove the file to go on without its images."),
        zipfile.ZipFile(io.BytesIO(read_whole(path, _LARGEST))) as file,
    ):
        if (size := sum(part.file_size for part in file.infolist())) > _LARGEST:
            raise ValueError(f"it unpacks to {size:,} bytes, and the most is {_LARGEST:,}")
        return {name.removesuffix(".npy"): _array(file, name) for name in file.namelist()}


def _array(file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    content = io.BytesIO(file.read(name))
    version = np.lib.format.read_magic(content)
    read: Any = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, _, dtype = read(content)
    if not 0 <= prod(shape) * dtype.itemsize <= len(content.getbuffer()):
        raise ValueError(f"it declares {shape} numbers, which are not there")
    content.seek(0)
    found: NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    return found
