"""The run folder: settings, versions, rows and images, or rounds; one process at a time, and nothing half written.

Settings are a frozen dataclass and its TOML text: the reader is Python's own, the writer is a few lines.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import math
import platform
import re
import tomllib
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gradveil.errors import GradveilError, SpecError, did_you_mean
from gradveil.files import (
    Locked,
    append_line,
    is_leftover,
    locked,
    read_whole,
    sync,
    wrap_os_errors,
    wrap_parse_errors,
    write_atomically,
)
from gradveil.files import Row as Row
from gradveil.ranges import hints_of
from gradveil.ranges import read as read_setting

T = TypeVar("T")
_LARGEST = 2**30  # bytes of an archive of images, and of what it unpacks to
_TEXT = 2**27  # bytes of a text, whose values are objects
CHANGED = "It was changed by hand, or damaged: take it from a copy, or choose another --out."


class FolderError(GradveilError):
    """A run folder cannot be read or continued, or another process is at work in it."""


def dumps(values: dict[str, Any]) -> str:
    """Return TOML for a flat table of texts, numbers, truths and lists of these; ``None`` is left out."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in values.items() if value is not None)


def to_toml(settings: Any) -> str:
    """Return the settings of a dataclass as TOML, its own before those it extends, defaults included."""
    declared = [name for cls in type(settings).__mro__ for name in vars(cls).get("__annotations__", {})]
    known = {field.name for field in dataclasses.fields(settings)}
    return dumps({name: getattr(settings, name) for name in dict.fromkeys(declared) if name in known})


def from_toml(cls: type[T], text: str) -> T:
    """Return the dataclass that a TOML text describes; an unknown or mistyped setting is an error."""
    known, values = hints_of(cls), {}
    for key, value in parse(text).items():
        if key not in known:
            raise SpecError(f"No setting is called {key!r}. {did_you_mean(key, known)}Known: {', '.join(known)}.")
        values[key] = read_setting(value, known[key], key, typed=True)
    return cls(**values)


def changes(text: str, settings: Any, free: Collection[str] = ()) -> list[str]:
    """Return what differs between settings and a TOML text of such settings: ``seed was 0, now 1``."""
    before, now = parse(text), parse(to_toml(settings))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    return [f"{key} was {before.get(key)!r}, now {now.get(key)!r}" for key in changed if key not in free]


def parse(text: str) -> dict[str, Any]:
    """Return the table of a TOML text."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"The settings are not TOML: {error}.") from error


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


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


Arrays = Mapping[str, NDArray[Any]]

CONFIG, VERSIONS, REPORT, LOCK = "config.toml", "versions.toml", "report.html", ".lock"
ROWS, IMAGES = "rows.jsonl", "images"  # of an audit or an item of the paper
ROUNDS, CHECKPOINT, MODEL = "rounds.jsonl", "checkpoint.safetensors", "model.safetensors"  # of a training run


_LOG = logging.getLogger("gradveil")
_IMAGE = re.compile(r".+-[0-9a-f]{8}\.npz")


class RunFolder:
    """One run on disk.

    ``start`` begins a run or continues one, and ``hold`` takes a folder as it is: both lock it until the ``with``
    block ends. ``open`` only reads. A unit of work is a name with its rows, written all or nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rows: list[Row] = []
        self._units: set[str] = set()
        self._other: dict[str, str] = {}  # versions that are not those under which the run was begun
        self._held = contextlib.ExitStack()

    @classmethod
    def start(
        cls, path: str | Path, settings: Any, resume: bool = False, may_change: Collection[str] = ()
    ) -> "RunFolder":
        """Begin a run with these settings, or continue one that has the same but for those that may change."""
        folder = cls(path)
        folder._check_place()
        is_new = not folder.path.exists()
        try:
            folder.hold()
            if (folder.path / CONFIG).exists():
                folder._check_run(settings, resume, may_change)
            if (folder.path / VERSIONS).exists():
                folder._compare(versions())
            else:
                write_atomically(folder.path / VERSIONS, dumps(versions()).encode())
            write_atomically(folder.path / CONFIG, to_toml(settings).encode())  # last: with settings it is a run
        except BaseException:
            folder._undo(is_new)
            raise
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """Read a run; what a kill left unfinished is dropped."""
        folder = cls(path)
        if not (folder.path / CONFIG).is_file():
            raise FolderError(f"{path} is not a run folder: it has no {CONFIG}. Give the folder of an earlier --out.")
        folder._read()
        return folder

    def hold(self) -> "RunFolder":
        """Make the folder if it is not there, lock it, read it, and remove what a killed process left."""
        try:
            with wrap_os_errors(self.path):
                if not self.path.exists():
                    self.path.mkdir(parents=True, exist_ok=True)
                    sync(self.path.parent)
                self._held.enter_context(locked(self.path / LOCK))
                self._read()
                self._sweep()
        except Locked as owner:
            raise FolderError(
                f"Another process ({owner}) is at work in {self.path}. Wait for its end, or choose another --out."
            ) from None
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Give the lock back."""
        self._held.close()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def config(self) -> str:
        """The settings, as TOML."""
        return read_text(self.path / CONFIG)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return read_table(self.path / CONFIG)

    @property
    def versions(self) -> dict[str, Any]:
        """What the results depend on beside the settings; nothing where the file is lost."""
        return read_table(self.path / VERSIONS) if (self.path / VERSIONS).exists() else {}

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every row of every finished unit, in the order they were written."""
        return tuple(self._rows)

    def done(self, unit: str) -> bool:
        """Return whether a unit of work is finished."""
        return unit in self._units

    def new(self, unit: str) -> str:
        """Return the name of a unit, with a number where that name is taken."""
        names = (unit if not number else f"{unit}/{number}" for number in count())
        return next(name for name in names if not self.done(name))

    def add(self, unit: str, rows: Sequence[Row], arrays: Arrays | None = None) -> None:
        """Write the rows (and images) of a unit, all or nothing."""
        if self.done(unit):
            raise FolderError(f"The unit {unit!r} is already in {self.path}.")
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
            with wrap_os_errors(self.path):
                (self.path / IMAGES).mkdir(exist_ok=True)
            write_atomically(self._image_file(unit), buffer.getvalue())
        made = {"versions": self._other} if self._other else {}
        new = [plain_json(row | made | {"unit": unit, "of": len(rows)}) for row in rows]
        write_atomically(self.path / ROWS, _lines([*self._rows, *new]))
        self._rows += new
        self._units.add(unit)

    def drop(self, units: Collection[str]) -> None:
        """Remove units of work: they are to be done again."""
        if gone := self._units & set(units):
            self._rows = [row for row in self._rows if row["unit"] not in gone]
            write_atomically(self.path / ROWS, _lines(self._rows))
            self._units -= gone
            for unit in gone:
                self._image_file(unit).unlink(missing_ok=True)

    def arrays(self, unit: str) -> dict[str, NDArray[Any]]:
        """Return the images of a unit by name; empty where it has none."""
        path = self._image_file(unit)
        if not path.exists():
            return {}
        return read_arrays(path)

    @property
    def rounds(self) -> list[Row]:
        """The rounds of a training run so far."""
        return read_rows(self.path / ROUNDS, {"round": int})

    def add_round(self, row: Row) -> None:
        """Write one round."""
        made = {"versions": self._other} if self._other else {}
        append_line(self.path / ROUNDS, json.dumps(plain_json(row | made), allow_nan=False))

    def keep_rounds(self, last: int) -> None:
        """Drop the rounds after the last one to be kept, and a line that was cut off."""
        write_atomically(self.path / ROUNDS, _lines(row for row in self.rounds if row["round"] <= last))

    def _sweep(self) -> None:
        """Remove what a killed process left: files half written, and images whose rows it did not come to write."""
        images = self.path / IMAGES
        kept = {self._image_file(unit) for unit in self._units}
        for path in (*self.path.iterdir(), *(images.iterdir() if images.is_dir() else ())):
            is_lost = path.parent == images and _IMAGE.fullmatch(path.name) and path not in kept
            if is_lost or is_leftover(path):
                path.unlink()

    def _undo(self, is_new: bool) -> None:
        """Leave nothing of a run that could not begin."""
        if is_new and self.path.is_dir():
            (self.path / VERSIONS).unlink(missing_ok=True)
        self.close()
        if is_new:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def _check_place(self) -> None:
        """Raise where the folder holds anything but a run or the first files of one."""
        if not self.path.exists() or (self.path / CONFIG).exists():
            return
        if not self.path.is_dir() or any(
            p.name not in (LOCK, VERSIONS) for p in self.path.iterdir() if not is_leftover(p)
        ):
            raise FolderError(f"{self.path} exists and is not an empty folder. Choose another --out.")

    def _compare(self, now: Mapping[str, str]) -> None:
        """Say where the run goes on under other versions; the rows that are made from now on carry these."""
        begun = self.versions
        self._other = {name: to for name, to in now.items() if name != "date" and begun.get(name, to) != to}
        if self._other:
            each = ", ".join(f"{name} {begun[name]} -> {to}" for name, to in self._other.items())
            _LOG.warning("%s was begun under other versions (%s): what is done from now on says so.", self.path, each)

    def _check_run(self, settings: Any, resume: bool, may_change: Collection[str]) -> None:
        if not resume:
            raise FolderError(f"{self.path} already holds a run. Continue it with --resume, or choose another --out.")
        with wrap_parse_errors(self.path / CONFIG, FolderError, CHANGED):
            changed = changes(self.config, settings, may_change)
        if changed:
            raise FolderError(
                f"{self.path} holds a run with other settings: {'; '.join(changed)}. Choose another --out."
            )

    def _read(self) -> None:
        images = self.path / IMAGES
        for path in (*self.path.iterdir(), *(images.iterdir() if images.is_dir() else ())):
            if path.is_symlink():  # it would be read, written to or cleared away elsewhere
                raise FolderError(f"{path} is a link, and a run folder has files of its own alone. Put the file there.")
        rows = read_rows(self.path / ROWS, {"unit": str, "of": int})
        there = Counter(row["unit"] for row in rows)
        self._rows = [row for row in rows if there[row["unit"]] == row["of"]]
        self._units = {row["unit"] for row in self._rows}

    def _image_file(self, unit: str) -> Path:
        readable = re.sub(r"[^\w.=-]+", "_", unit)[:80]
        return self.path / IMAGES / f"{readable}-{hashlib.sha256(unit.encode()).hexdigest()[:8]}.npz"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on, and the day."""
    known = {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version()}
    known["system"] = f"{platform.system()} {platform.machine()}"
    for package in ("gradveil", "torch", "numpy", "scipy", "torchmetrics"):
        with contextlib.suppress(PackageNotFoundError):
            known[package] = version(package)
    return known


def _lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()


def plain_json(value: Any) -> Any:
    """Return the value as JSON has it: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {key: plain_json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
