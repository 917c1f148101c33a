"""Files written whole or not at all, read within limits, and locks that end with the process that holds them."""

import contextlib
import errno
import fcntl
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradveil.errors import GradveilError

Row = dict[str, Any]  # of a file of rows: one JSON object a line
_LEFTOVER = re.compile(r"\..+\.\d+(-[0-9a-f]{8})?\.tmp")  # temporary names that a kill can leave


_LOG = logging.getLogger("gradveil")
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # some network file systems
_TENSORS, _HEADER = 100_000, 2**25  # of a file of tensors: how many, and the bytes that say what they are
started_as: int | None = None  # the process that a user knows, where it is another one that works for it
_ANOTHER_OUT = "Choose another --out."


class WriteError(GradveilError):
    """The file system refuses: no space, no right, no such folder."""


def cache_folder() -> Path:
    """Return ``GRADVEIL_CACHE``, else ``~/.cache/gradveil``."""
    return Path(os.environ.get("GRADVEIL_CACHE") or Path.home() / ".cache" / "gradveil").expanduser()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and for good: beside it first, on the disk, then put in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with wrap_os_errors(path):
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to the end of a file; a kill can leave a part of it, which has no line end."""
    is_new = not path.exists()
    with wrap_os_errors(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(path.parent)


class Locked(GradveilError):
    """Another process holds a lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False, needed: bool = False) -> Iterator[None]:
    """Hold a lock file with our number in it; where another process does, wait for its end, or raise ``Locked``.

    The system gives the lock back when a process ends, however it ends: a file that is left behind says nothing. A file
    system without locks is told, and raises where the lock is needed.
    """
    handle = _lock(path, wait, needed)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before it is given back: nobody else can hold this file
        os.close(handle)


def _lock(path: Path, wait: bool, needed: bool) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)  # a link's target would be overwritten
        try:
            _take(handle, path, wait, needed)
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                os.ftruncate(handle, 0)
                os.write(handle, f"pid {started_as or os.getpid()} on {platform.node()}\n".encode())
                return handle
        except FileNotFoundError:  # its owner removed it before it was ours
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _take(handle: int, path: Path, wait: bool, needed: bool) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise Locked(_owner(handle)) from None
    except OSError as error:
        if needed or error.errno not in _NO_LOCKS:
            raise
        _LOG.warning("%s cannot be locked (%s): let no other process write there.", path.parent, error.strerror)


def _owner(handle: int) -> str:
    """Return who holds a lock; an owner writes it down right after it has the lock."""
    for _ in range(100):
        if owner := os.pread(handle, 100, 0).decode(errors="replace").strip():
            return owner
        time.sleep(0.01)
    return "unknown"


def is_leftover(path: Path) -> bool:
    """Return whether this is a temporary file of a writer that was killed."""
    return _LEFTOVER.fullmatch(path.name) is not None


@contextlib.contextmanager
def wrap_os_errors(path: Path, advice: str = _ANOTHER_OUT) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = "What was finished is kept: free some space, then repeat with --resume."
            raise WriteError(f"No space left for {path}. {kept if advice is _ANOTHER_OUT else advice}") from error
        raise WriteError(f"Cannot write {path}: {error.strerror}. {advice}") from error


@contextlib.contextmanager
def wrap_parse_errors(what: Any, error: type[GradveilError], advice: str) -> Iterator[None]:
    """Turn whatever a parser raises at a damaged or hostile file into one line: they raise errors of every kind."""
    try:
        yield
    except GradveilError:
        raise
    except Exception as reason:
        said = " ".join(str(reason).split())[:200]
        raise error(f"{what} cannot be read ({said or type(reason).__name__}). {advice}") from reason


def read_whole(path: Path, most: int) -> bytes:
    """Return what a file holds; one that is no plain file, or larger than so many bytes, is not read."""
    if not path.is_file():
        raise OSError(errno.ENOENT, "no such file")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{size:,} bytes, and the most is {most:,}")
    return path.read_bytes()


def open_alone(path: Path, flags: int) -> int:
    """Open a plain file with one name; a link, a second name, a pipe or a device is a ``ValueError``."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise ValueError("it is a link or no plain file") from error
        raise
    found = os.fstat(handle)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return handle
    os.close(handle)
    raise ValueError("it is no plain file, or has a second name (a hard link)")


def make_folder(path: Path) -> None:
    """Make a folder with those above it, for good, for its owner alone."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync(path.parent)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata; to be called where damage is told."""
    from safetensors import safe_open

    if not path.is_file():
        raise OSError(errno.ENOENT, "no such file")
    with path.open("rb") as raw:
        if (size := int.from_bytes(raw.read(8), "little")) > _HEADER:
            raise ValueError(f"a header of {size:,} bytes, and the most is {_HEADER:,}")
    with safe_open(path, framework="pt") as file:
        if (count := len(file.keys())) > _TENSORS:
            raise ValueError(f"{count:,} tensors, and the most is {_TENSORS:,}")
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, value in found.items():
            if (kind := str(value.dtype).removeprefix("torch.")).startswith(("float8", "float4", "complex")):
                raise ValueError(f"{name!r} is {kind}, which cannot be reckoned with here: give float32")
        return found, dict(file.metadata() or {})


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, last; not every file system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
