"""A frozen dataclass of settings <-> TOML text: the reader is Python's own, the writer is these few lines."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import math
import os
import platform
import re
import tomllib
import types
import typing
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradveil.errors import GradveilError, SpecError, did_you_mean

T = TypeVar("T")


def dumps(values: dict[str, Any]) -> str:
    """Return TOML for a flat table of texts, numbers, truths and lists of these; ``None`` is left out."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items() if value is not None)


def to_toml(settings: Any) -> str:
    """Return the settings of a dataclass as TOML, defaults included: what was run can be read off."""
    return dumps({field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)})


def from_toml(cls: type[T], text: str) -> T:
    """Return the dataclass that a TOML text describes; an unknown or mistyped setting is an error."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"The settings are not TOML: {error}.") from error
    hints = typing.get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise SpecError(f"No setting is called {key!r}. {did_you_mean(key, known)}Known: {', '.join(known)}.")
        values[key] = _convert(key, value, hints[key])
    return cls(**values)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _convert(key: str, value: Any, to: Any) -> Any:
    options = typing.get_args(to) if typing.get_origin(to) in (typing.Union, types.UnionType) else (to,)
    for option in options:
        if typing.get_origin(option) is tuple:
            inner = typing.get_args(option)[0]
            if isinstance(value, list) and all(_is(v, inner) for v in value):
                return tuple(inner(v) for v in value)
        elif _is(value, option):
            return option(value)
    raise SpecError(f"The setting {key} = {_value(value)} has the wrong type; it must be {_name(to)}.")


def _is(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float))
    return kind in (int, str) and isinstance(value, kind)


def _name(to: Any) -> str:
    return to.__name__ if isinstance(to, type) and typing.get_origin(to) is None else str(to)


Row = dict[str, Any]
Arrays = Mapping[str, NDArray[Any]]

CONFIG, VERSIONS, ROWS, IMAGES, REPORT = "config.toml", "versions.toml", "rows.jsonl", "images", "report.html"


class StoreError(GradveilError):
    """A run folder cannot be written, read or continued."""


class Store:
    """The run folder. Use ``create`` for a new run or one to continue, ``open`` to read one."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        self.folder = folder
        self._rows = rows
        self._units = {row["unit"] for row in rows}

    @classmethod
    def create(cls, folder: str | Path, config: str, resume: bool = False) -> "Store":
        """Start a run with this TOML as its settings, or continue one that has the same."""
        folder = Path(folder)
        if (folder / CONFIG).exists():
            if not resume:
                raise StoreError(f"{folder} already holds a run. Continue it with --resume, or choose another --out.")
            _check_same(folder, (folder / CONFIG).read_text(encoding="utf-8"), config)
            return cls.open(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise StoreError(f"{folder} exists and is not an empty folder. Choose another --out.")
        is_new = not folder.exists()
        try:
            with _told(folder):
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / VERSIONS, dumps(versions()).encode())
            write_atomically(folder / CONFIG, config.encode())  # last: a folder with settings is a run
        except StoreError:
            with contextlib.suppress(OSError):
                (folder / VERSIONS).unlink(missing_ok=True)
                if is_new:
                    folder.rmdir()
            raise
        return cls(folder, [])

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Read a run; what a kill left unfinished is dropped."""
        folder = Path(folder)
        if not (folder / CONFIG).is_file():
            raise StoreError(f"{folder} is not a run folder: it has no {CONFIG}. Give the folder of an earlier --out.")
        path = folder / ROWS
        return cls(folder, _whole_units(_read_rows(path)) if path.exists() else [])

    @property
    def config(self) -> str:
        """The settings, as TOML."""
        return (self.folder / CONFIG).read_text(encoding="utf-8")

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row of every finished unit, in the order they were written."""
        return tuple(self._rows)

    def done(self, unit: str) -> bool:
        """Return whether a unit of work is finished."""
        return unit in self._units

    def add(self, unit: str, rows: Sequence[Row], arrays: Arrays | None = None) -> None:
        """Write the rows (and images) of a unit, all or nothing."""
        if self.done(unit):
            raise StoreError(f"The unit {unit!r} is already in {self.folder}.")
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
            with _told(self.folder):
                (self.folder / IMAGES).mkdir(exist_ok=True)
            write_atomically(self._image_file(unit), buffer.getvalue())
        new = [plain_json(row | {"unit": unit, "of": len(rows)}) for row in rows]
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in [*self._rows, *new])
        write_atomically(self.folder / ROWS, text.encode())
        self._rows += new
        self._units.add(unit)

    def arrays(self, unit: str) -> dict[str, NDArray[Any]]:
        """Return the images of a unit by name; empty where it has none."""
        path = self._image_file(unit)
        if not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}

    def _image_file(self, unit: str) -> Path:
        readable = re.sub(r"[^\w.=-]+", "_", unit)[:80]
        return self.folder / IMAGES / f"{readable}-{hashlib.sha256(unit.encode()).hexdigest()[:8]}.npz"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside it first, then put in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _told(path):
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, and the day."""
    found = {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version()}
    found["system"] = f"{platform.system()} {platform.machine()}"
    for package in ("gradveil", "torch", "numpy", "scipy", "torchmetrics"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@contextlib.contextmanager
def _told(path: Path) -> Any:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"No space left for {path}. What was finished is kept: free some space, then repeat with --resume."
            ) from error
        raise StoreError(f"Cannot write {path}: {error.strerror}. Choose another --out.") from error


def _read_rows(path: Path) -> list[Row]:
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):  # after the last line end: empty, or torn
                break
            raise StoreError(
                f"Line {number} of {path} is not JSON ({error.msg}). The file was changed by hand?"
            ) from None
    return rows


def _whole_units(rows: list[Row]) -> list[Row]:
    there = Counter(row["unit"] for row in rows)
    return [row for row in rows if there[row["unit"]] == row["of"]]


def _check_same(folder: Path, old: str, new: str) -> None:
    before, after = tomllib.loads(old), tomllib.loads(new)
    changed = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    if changed:
        found = "; ".join(f"{key} was {before.get(key)!r}, now {after.get(key)!r}" for key in changed)
        raise StoreError(f"{folder} holds a run with other settings: {found}. Choose another --out.")


def plain_json(value: Any) -> Any:
    """Return the value as JSON has it: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: plain_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
