"""Hostile files by the thousand: valid ones with bits flipped, cut, joined, and with wrong types in their metadata."""

import contextlib
import copy
import json
import os
import random
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from faults.conftest import LONG, Count
from gradveil.errors import GradveilError

MEMORY = 2**30  # bytes that reading a small file may add, at most
SECONDS = 20.0  # of processor time that one file may take
NEIGHBOURS = 9 if LONG else 0  # that are read beside each file drawn

WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 10**400, 1e308, -1e308, 1e-320, "", "x", "1e9", "\ud800", "a\0b", "../x",
    "../../../../etc/passwd", [], [1], ["x"], {}, {"a": 1}, [[]],
)  # fmt: skip
TEXTS = (*map(json.dumps, WRONG), "NaN", "Infinity", "[" * 3000, "'", "", "{", "1e999", "9" * 5000)
numbers = st.integers(0, 2**16)


@st.composite
def damaged(draw: st.DrawFn, valid: tuple[bytes, ...]) -> bytes:
    """A valid file with a few things done to it."""
    content = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 3))):
        kind, at, more = draw(st.integers(0, 7)), draw(numbers), draw(numbers)
        if not content:
            break
        place = at % len(content)
        if kind == 0:
            content[place] ^= 1 << more % 8
        elif kind == 1:
            del content[place:]
        elif kind == 2:
            del content[place : place + more % 64]
        elif kind == 3:
            content[place:place] = content[more % len(content) :][:64]
        elif kind == 4:
            other = draw(st.sampled_from(valid))
            content[place:] = other[more % (len(other) + 1) :]
        elif kind == 5:
            size = (1, 2, 4, 8)[more % 4]
            content[place : place + size] = (b"\xff" * size, b"\0" * size, b"\x7f" * size)[more % 3]
        elif kind == 6:
            content[place : place + 8] = struct.pack("<q", (2**31, 2**62, -1, 2**40)[more % 4])
        else:
            content[place:place] = draw(st.binary(max_size=16))
    return bytes(content)


@st.composite
def wrong_values(draw: st.DrawFn, valid: tuple[Any, ...]) -> Any:
    """A valid value of JSON with some inner ones exchanged for others, dropped, or under another name."""
    found = json.loads(json.dumps(draw(st.sampled_from(valid))))
    for _ in range(draw(st.integers(0, 3))):
        places = list(_places(found))
        if not places:
            break
        holder, key = places[draw(numbers) % len(places)]
        action = draw(st.integers(0, 3))
        if action == 0:
            del holder[key]
        elif action == 1 and isinstance(holder, dict):
            holder[draw(st.sampled_from(["x", "unit", "kind", "", "../y"]))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw(st.sampled_from(WRONG)))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield value, key
        yield from _places(one)


def neighbours(drawn: Any) -> Iterator[Any]:
    """Yield, in the long form, what was drawn with more damage: it takes less time than drawing does."""
    if isinstance(drawn, tuple) and isinstance(drawn[-1], (bytes, str)):
        for last in neighbours(drawn[-1]):
            yield (*drawn[:-1], last)
    elif isinstance(drawn, str):
        for raw in neighbours(drawn.encode(errors="surrogatepass")):
            yield raw.decode(errors="surrogateescape")
    elif isinstance(drawn, bytes) and drawn:
        draws = random.Random(drawn)
        for _ in range(NEIGHBOURS):
            yield _more_damage(drawn, draws)


def _more_damage(drawn: bytes, draws: random.Random) -> bytes:
    content = bytearray(drawn)
    for _ in range(draws.randint(1, 3)):
        place, kind = draws.randrange(len(content) + 1), draws.randrange(8)
        if kind == 0:
            del content[place:]
        elif kind == 1:
            content[place:place] = draws.randbytes(draws.randint(1, 8))
        elif place < len(content):
            content[place] ^= 1 << draws.randrange(8)
    return bytes(content)


class Watch:
    """While it is on, notes every file that is opened for writing, made, moved or removed, and every program run."""

    def __init__(self) -> None:
        self.on = False
        self.place = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, _, flags = args
            if not (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            self._note(path)
        elif event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
            self._note(args[0])
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
            self.seen.append(event)

    def _note(self, path: Any) -> None:
        if isinstance(path, int):  # a file that is open
            return
        where = os.path.abspath(os.fsdecode(path))
        if not where.startswith((self.place, "/dev/", "/proc/")) and "__pycache__" not in where:
            self.seen.append(where)


WATCH = Watch()


class TooLong(BaseException):
    """Reading took too much time."""


def _too_long(*_: object) -> None:
    raise TooLong


@contextlib.contextmanager
def limits(place: Path) -> Iterator[None]:
    """Within, a file may be read for some seconds and with some memory, and nothing outside a folder is touched."""
    before = signal.signal(signal.SIGPROF, _too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    WATCH.place, WATCH.seen, WATCH.on = str(place), [], True
    try:
        yield
    finally:
        WATCH.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert not WATCH.seen, WATCH.seen


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Within, the process cannot take much more memory than it has, and must not have taken much of that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = 4096 * int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (now + 4 * MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most)
    assert grown < MEMORY, f"{grown / 2**20:.0f} MiB"


def drill(
    what: str, files: st.SearchStrategy[Any], read: Callable[[Any], Any], place: Path, number: int, count: Count
) -> None:
    """Give a reader so many files: it answers, or raises one error of ours in one line."""
    tried = {"cases": 0, "refused": 0}
    began = time.process_time()

    @settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(files)
    def each(drawn: Any) -> None:
        for content in (drawn, *neighbours(drawn)):
            tried["cases"] += 1
            try:
                with limits(place):
                    read(content)
            except GradveilError as error:
                tried["refused"] += bool(str(error).strip())
            except BaseException as error:
                error.add_note(f"The file: {content!r}")
                raise

    with little_memory():
        each()
    assert tried["cases"] > 0.5 * number, "there are not as many different ones"
    count(f"hostile {what}", tried["cases"])
    if LONG:
        print(f"{what}: {tried}, {time.process_time() - began:.0f} s")
