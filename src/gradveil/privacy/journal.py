"""The journal of a client's account: a line for each payment, on the disk before anything is sent, in a chain.

An account is two files. ``account.json`` says in one line how things stand, and is put in place whole. Beside it
``account.json.journal`` is only ever added to: every line holds the running total and the SHA-256 of the line before.
The journal is what counts. Where it is ahead, a writer was killed in between or an older ``account.json`` was put back,
and its total holds; where it is behind, missing, of another account or a copy, nothing is paid. Both files put back
as they were together cannot be told from the truth.
"""

import hashlib
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradveil.errors import BudgetError
from gradveil.files import open_alone, sync, wrap_parse_errors

SUFFIX, MOST = ".journal", 2**16  # bytes of an account, and of the journal's end that is looked at
NOT_SENT = "Nothing is sent."
MOVED = (
    'An account that was moved for good begins anew from one line, {"client": ..., "spent": ..., "limit": ...}, with '
    "what was spent, and without a journal."
)


@dataclass(frozen=True)
class Ending:
    """Where a journal ends."""

    line: dict[str, Any] | None  # the last payment
    mark: str  # its SHA-256
    whole: int  # bytes up to its end; what comes after was cut off by a kill and never paid for anything

    @property
    def count(self) -> int:
        """How many payments there are."""
        return 0 if self.line is None else int(self.line["release"])


def journal_of(path: Path) -> Path:
    """Return the journal of an account's file."""
    return path.with_name(path.name + SUFFIX)


def read_journal(path: Path) -> Ending:
    """Return where the journal beside an account's file ends; a copy of another one is refused."""
    beside = journal_of(path)
    with wrap_parse_errors(beside, BudgetError, NOT_SENT):
        try:
            handle = open_alone(beside, os.O_RDONLY)
        except FileNotFoundError:
            return Ending(None, "", 0)
        try:
            found = os.fstat(handle)
            begin = max(0, found.st_size - MOST)
            end = os.pread(handle, MOST, begin)
        finally:
            os.close(handle)
        whole = end.rfind(b"\n") + 1
        if not whole:
            if begin:
                raise ValueError("no line in its last bytes")
            return Ending(None, "", 0)
        last = end[:whole].splitlines(keepends=True)[-1]
        line = json.loads(last)
        if line["file"] != found.st_ino:
            raise BudgetError(
                f"{beside} is a copy of the journal that it was begun as, or was put back: two that spend from the "
                f"same account, or one that forgets, would promise what does not hold. {NOT_SENT} {MOVED}"
            )
        int(line["release"])
    return Ending(line, hashlib.sha256(last).hexdigest(), begin + whole)


def add_to_journal(path: Path, stand: Ending, payment: dict[str, Any]) -> tuple[int, str]:
    """Add a payment after the last one, for good, and return its number and its mark."""
    beside = journal_of(path)
    handle = open_alone(beside, os.O_RDWR | os.O_CREAT)
    try:
        found = os.fstat(handle)
        number = stand.count + 1
        line = {"release": number, **payment, "file": found.st_ino, "before": stand.mark, "once": secrets.token_hex(8)}
        content = (json.dumps(line) + "\n").encode()
        os.ftruncate(handle, stand.whole)
        if os.pwrite(handle, content, stand.whole) != len(content):
            raise BudgetError(f"{beside} could not be written to its end. {NOT_SENT}")
        os.fsync(handle)
    finally:
        os.close(handle)
    if not stand.whole:
        sync(beside.parent)
    return number, hashlib.sha256(content).hexdigest()


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return what an account's file says; None where there is none."""
    with wrap_parse_errors(path, BudgetError, NOT_SENT):
        try:
            handle = open_alone(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if (size := os.fstat(handle).st_size) > MOST:
                raise ValueError(f"{size:,} bytes, and the most is {MOST:,}")
            said = json.loads(os.pread(handle, MOST, 0))
        finally:
            os.close(handle)
        if not isinstance(said, dict):
            raise ValueError("no account")
    return said


def check_summary(path: Path, said: dict[str, Any] | None, stand: Ending) -> None:
    """Raise where the journal is behind the account's file, or of another account."""
    with wrap_parse_errors(path, BudgetError, NOT_SENT):
        count, mark = (0, "") if said is None else (int(said.get("releases", 0)), said.get("last", ""))
    if count > stand.count:
        raise BudgetError(
            f"{path} counts {count} payments and its journal {stand.count}: the journal was cut off, put back or "
            f"removed. {NOT_SENT} Put the right one back. {MOVED}"
        )
    if count and count == stand.count and mark != stand.mark:
        raise BudgetError(f"{path} and its journal are of two accounts. {NOT_SENT} Put the right ones back.")
