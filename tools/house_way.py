"""The way of one client's batch through a command, traced from a real run on digits.

    python tools/house_way.py audit [--root TREE] [--calls]

The way begins where the client's examples are put into a ``Batch`` and ends where rows are written to a ``.jsonl``
file; of the stretches between two writes it is the first in which an attack brings a ``Reconstruction`` back, or,
where nothing is attacked, the first in which a client makes an ``Update``. ``veil`` follows a step of a training loop
under ``protect`` in place of a command, from the forward pass to the optimizer. On it stand the functions of
src/gradveil in the order in which each is called first, without those that run while a module is imported. Neighbours
in one file are one stop. Counted are

- *files*: how many different ones there are among the stops;
- *folder changes*: how often a stop lies in another folder than the one before. A folder is a package right below
  src/gradveil, with all that lies in it; the files beside the packages (types, tree, ...) are one folder as well;
- *between packages*: the same without the files beside the packages, which hold the nouns that all others speak of.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = "representation:share=0.4"
COMMANDS = {
    "audit": f"audit --rounds 1 --images 1 --defense {OURS} --attack dlg:steps=3,restarts=1 --out run",
    "train": f"train --rounds 1 --partition iid:devices=10,per_device=8 --engine sequential --defense {OURS} --out run",
    "tradeoff": "reproduce tradeoff:datasets=digits,quick_images=1,quick_steps=3,quick_gs_steps=3 --jobs 1 --out run "
    f"--only dlg-digits/{OURS}",
}
NOUNS = ("Batch", "Update", "Reconstruction")
IS_FUNCTION = 1  # CO_OPTIMIZED: not set for the bodies of modules and classes
Call = tuple[str, str]  # file below src/gradveil, qualified name


class Stretch:
    """What was called between two writes of rows, each function once, and which nouns were made."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.begin: int | None = None  # the call that made the first batch
        self.nouns: set[str] = set()

    @property
    def way(self) -> list[Call]:
        """From the first batch on."""
        return [] if self.begin is None else self.calls[self.begin :]


class Tracer:
    """A trace function that cuts a run into stretches."""

    def __init__(self, source: Path) -> None:
        self.source = f"{source}{os.sep}"
        self.stretches = [Stretch()]
        self.on = False
        self._seen: set[CodeType] = set()  # since rows were written
        self._foreign: set[CodeType] = set()

    def call(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call that is the first of its function since rows were written."""
        code = frame.f_code
        if code in self._foreign or code in self._seen or not self.on:
            return
        now = self.stretches[-1]
        if code.co_name == "__init__" and code.co_filename == "<string>":  # of a dataclass
            noun = type(frame.f_locals.get("self")).__name__
            if noun in NOUNS:
                now.nouns.add(noun)
                if noun == "Batch" and now.begin is None:
                    now.begin = max(len(now.calls) - 1, 0)
        elif not code.co_filename.startswith(self.source) or not code.co_flags & IS_FUNCTION:
            self._foreign.add(code)
        elif not any(above.f_code.co_filename.startswith("<frozen importlib") for above in _above(frame)):
            self._seen.add(code)
            now.calls.append((code.co_filename.removeprefix(self.source), code.co_qualname))

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Begin a new stretch when a file of rows is written or replaced."""
        if not self.on or event not in ("open", "os.rename"):
            return
        path = args[1] if event == "os.rename" else args[0] if _writes(args) else None
        if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(".jsonl"):
            self.stretches.append(Stretch())
            self._seen.clear()

    def way(self) -> list[Call]:
        """Return the calls on the way of one batch."""
        for noun in ("Reconstruction", "Update"):
            for stretch in self.stretches:
                if noun in stretch.nouns and stretch.way:
                    return stretch.way
        raise SystemExit("No batch was followed: nothing was attacked and no client trained.")


def _above(frame: FrameType) -> Iterator[FrameType]:
    above = frame.f_back
    while above is not None:
        yield above
        above = above.f_back


def _writes(opened: tuple[Any, ...]) -> bool:
    mode, flags = opened[1], opened[2]
    return any(c in mode for c in "wax+") if isinstance(mode, str) else bool(flags & (os.O_WRONLY | os.O_RDWR))


def folder(file: str) -> str:
    """Return the package right below src/gradveil; ``""`` for the files beside the packages."""
    return file.split(os.sep)[0] if os.sep in file else ""


def count(way: Sequence[Call]) -> dict[str, int]:
    """Return the files and the folder changes of a way."""
    stops = [file for file, _ in groupby(way, key=lambda call: call[0])]
    folders = [folder(file) for file in stops]
    packages = [name for name in folders if name]
    return {
        "files": len(set(stops)),
        "folder changes": sum(a != b for a, b in pairwise(folders)),
        "between packages": sum(a != b for a, b in pairwise(packages)),
    }


def trace(command: str, root: Path = ROOT) -> list[Call]:
    """Run a command of the tree in this process and return the way of one batch through it."""
    sys.path.insert(0, str(root / "src"))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from gradveil.cli.main import entry

    torch.set_num_threads(1)
    tracer = Tracer(root / "src" / "gradveil")
    here, said = os.getcwd(), sys.stdout
    with tempfile.TemporaryDirectory() as place, Path(os.devnull).open("w") as nowhere:
        os.chdir(place)
        sys.argv = ["gradveil", *COMMANDS[command].split()]
        sys.stdout = nowhere
        sys.addaudithook(tracer.audit)
        tracer.on = True
        sys.settrace(tracer.call)
        try:
            entry()
        except SystemExit as ended:
            if ended.code:
                raise
        finally:
            sys.settrace(None)
            tracer.on = False
            sys.stdout = said
            os.chdir(here)
    return tracer.way()


def step(root: Path = ROOT) -> list[Call]:
    """Return the way of a step of a loop under ``protect``: the third, when a guard no longer looks at a new model."""
    sys.path.insert(0, str(root / "src"))
    import torch
    from torch import nn

    import gradveil

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracer, x, y = Tracer(root / "src" / "gradveil"), torch.rand(8, 1, 8, 8), torch.arange(8) % 5
    with gradveil.protect(model, "veil:z=1,clip=1"):
        for number in range(3):
            tracer.on = number == 2
            sys.settrace(tracer.call if tracer.on else None)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        sys.settrace(None)
    return tracer.stretches[-1].calls


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "veil"])
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree of gradveil")
    parser.add_argument("--calls", action="store_true", help="print every call on the way")
    given = parser.parse_args()
    root = given.root.resolve()
    followed = step(root) if given.command == "veil" else trace(given.command, root)
    print("\n".join(f"{file}: {name}" for file, name in followed) if given.calls else json.dumps(count(followed)))
