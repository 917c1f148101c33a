"""Files written whole or not at all."""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from gradveil.errors import GradveilError

# what a kill can leave: our own temporary names, and those of earlier versions
_LEFTOVER = re.compile(r"\..+\.\d+(-[0-9a-f]{8})?\.tmp|(checkpoint|model)\.safetensors\.part|rounds\.jsonl\.part")


class WriteError(GradveilError):
    """The file system refuses: no space, no right, no such folder."""


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and for good: beside it first, on the disk, then put in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with refusals_told(path):
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Add a line to the end of a file; a kill can leave a part of it, which has no line end."""
    is_new = not path.exists()
    with refusals_told(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(path.parent)


def is_leftover(path: Path) -> bool:
    """Return whether this is a temporary file of a writer that was killed."""
    return _LEFTOVER.fullmatch(path.name) is not None


@contextlib.contextmanager
def refusals_told(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WriteError(
                f"No space left for {path}. What was finished is kept: free some space, then repeat with --resume."
            ) from error
        raise WriteError(f"Cannot write {path}: {error.strerror}. Choose another --out.") from error


def _sync_folder(folder: Path) -> None:
    """Make a new name in a folder last; not every file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
