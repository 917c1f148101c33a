"""A warm process that runs ``gradveil`` commands in forked children, with a fault in them: importing torch anew for
each of some hundred commands would take longer than all of them."""

import atexit
import contextlib
import errno
import gc
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GONE = 20.0  # seconds in which what a process started must be gone after it
LIMIT = 240.0  # seconds that a command may take
TOO_LONG = 124  # the exit code of one that took longer


@dataclass(frozen=True)
class Act:
    """One command and what befalls it."""

    words: tuple[str, ...]
    folder: str  # where it runs
    fault: str = ""  # see ``arm``
    at: int = 0  # the point at which it strikes, from 1
    after: float | None = None  # seconds until it is killed
    number: int = signal.SIGKILL  # what kills it
    user: int | None = None  # run as this user
    watched: bool = False  # in a process of its own, as the installed program does


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    code: int  # exit code; negative: the signal
    pid: int
    out: str
    err: str
    points: int  # passed, at which a fault could strike
    seconds: float
    memory: int  # the most it had, in bytes; what a fork shares with the stage counts
    alive: list[str]  # processes that it left behind


def one_line(cut: Outcome) -> bool:
    """Whether an error was told in one line, after what was said of progress."""
    said = [line for line in cut.err.splitlines() if line.startswith("gradveil: ")]
    return len(said) == 1 and cut.err.splitlines()[-1] == said[0] and "Traceback" not in cut.err


class Stage:
    """Starts the warm process and hands it commands."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )

    def run(self, *acts: Act) -> list[Outcome]:
        """Run these at the same time, and wait for their ends."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(act) for act in acts]) + "\n")
        self._process.stdin.flush()
        return [Outcome(**outcome) for outcome in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def arm(fault: str, at: int, number: int, passed: mmap.mmap) -> None:
    """Put a fault in place, and count the points that are passed.

    ``before``, ``after``: killed before, or after, a file is put in its place. ``torn``: killed when half of what was
    written is on the disk. ``full``: from this write on the disk is full. ``large``: no file grows over ``at`` bytes.
    """
    replace, fsync = os.replace, os.fsync

    def strikes() -> bool:
        (count,) = struct.unpack("q", passed[:8])
        passed[:8] = struct.pack("q", count + 1)
        return count + 1 == at or (fault == "full" and 0 < at <= count + 1)

    def kill() -> None:
        send(os.getpid(), number)

    def replacing(*args: Any, **kwargs: Any) -> None:
        here = fault in ("before", "after") and strikes()
        if here and fault == "before":
            kill()
        replace(*args, **kwargs)
        if here and fault == "after":
            kill()

    def syncing(handle: int) -> None:
        if fault in ("torn", "full") and strikes():
            if fault == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            tear(Path(os.readlink(f"/proc/self/fd/{handle}")))
            kill()
        fsync(handle)

    os.replace, os.fsync = replacing, syncing
    if fault == "large":
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))


def send(pid: int, number: int) -> None:
    """Send a signal: Ctrl-C to a process and its workers, as a terminal does, others to the process alone."""
    os.killpg(pid, number) if number == signal.SIGINT else os.kill(pid, number)


def tear(path: Path) -> None:
    """Leave half of what was written last: of a temporary file, or of a file's last line."""
    if path.is_file():
        content = path.read_bytes()
        start = 0 if path.name.startswith(".") else content.rstrip(b"\n").rfind(b"\n") + 1
        os.truncate(path, start + (len(content) - start) // 2)


def perform(act: Act, passed: mmap.mmap, out: Path, err: Path) -> None:
    """Run a command in this process and end."""
    from gradveil.cli.main import entry, program

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), number)
    os.chdir(act.folder)
    if act.user is not None:
        os.setgid(act.user)
        os.setuid(act.user)
    arm(act.fault, act.at, act.number, passed)
    sys.argv = ["gradveil", *act.words]
    code: Any = 0
    try:
        (program if act.watched else entry)()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as at the end of any program, but for the memory, which is the stage's


def warm() -> None:
    """Run some commands here, so that all they import is there for every child."""
    import faults.mine
    import faults.sums  # noqa: F401 - registers them
    from faults.plays import COMMANDS
    from gradveil.cli.main import entry

    with (
        tempfile.TemporaryDirectory() as place,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for name in ("train vectorised", "audit", "reproduce"):
            sys.argv = ["gradveil", *COMMANDS[name], "--out", str(Path(place, name))]
            with contextlib.suppress(SystemExit):
                entry()
    gc.collect()
    gc.freeze()  # else every child goes through all of it again


def outcomes(acts: list[Act]) -> list[Outcome]:
    """Fork a child for each, send the signals, wait, and look for what was left behind."""
    place = tempfile.mkdtemp()  # not in a with block: a child that ends would remove it
    running: dict[int, tuple[int, mmap.mmap, float]] = {}
    for i, act in enumerate(acts):
        passed = mmap.mmap(-1, 8)
        if (pid := os.fork()) == 0:
            perform(act, passed, Path(place, f"{i}.out"), Path(place, f"{i}.err"))
        running[pid] = i, passed, time.monotonic()
    found: dict[int, Outcome] = {}
    sent: set[int] = set()
    while running:
        time.sleep(0.002)
        for pid, (i, passed, began) in list(running.items()):
            done, status, used = os.wait4(pid, os.WNOHANG)
            gone, after = time.monotonic() - began, acts[i].after
            if not done and after is not None and gone > after and pid not in sent:
                sent.add(pid)
                os.kill(pid, acts[i].number)
            if not done and gone > LIMIT:
                os.killpg(pid, signal.SIGKILL)
            if done:
                del running[pid]
                code = TOO_LONG if gone > LIMIT else os.waitstatus_to_exitcode(status)
                out, err = (said(Path(place, f"{i}.{end}")) for end in ("out", "err"))
                points: int = struct.unpack("q", passed[:8])[0]
                found[i] = Outcome(code, pid, out, err, points, gone, 1024 * used.ru_maxrss, left_behind(pid))
    shutil.rmtree(place)
    return [found[i] for i in range(len(acts))]


def said(path: Path) -> str:
    """Return what a command wrote; one that was killed at once has no such file."""
    return path.read_text(errors="replace") if path.exists() else ""


def left_behind(session: int) -> list[str]:
    """Return the processes of a session that do not go away by themselves, and end them."""
    until = time.monotonic() + GONE
    while (alive := _of_session(session)) and time.monotonic() < until:
        time.sleep(0.05)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    return list(alive.values())


def _of_session(session: int) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _, _, its = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                words = (folder / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended
                continue
            if int(its) == session and state != "Z":
                found[int(folder.name)] = words
    return found


def main() -> None:
    """Read lists of acts as JSON and answer with their outcomes."""
    answers = os.fdopen(os.dup(1), "w")
    warm()
    for line in sys.stdin:
        acts = [Act(**act) for act in json.loads(line)]
        answers.write(json.dumps([asdict(outcome) for outcome in outcomes(acts)]) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
