"""What one table or figure of the paper is: units of work in, rows out, a verdict by a stated rule."""

import time
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from gradveil.errors import GradveilError
from gradveil.federated.processes import apart_from_the_folder, available_cores, end_with_parent, ignore_sigint
from gradveil.protection.defense import Defense
from gradveil.protection.defense import build as build_defense
from gradveil.registry import Registry
from gradveil.seeds import Seeds

Row = dict[str, Any]
ITEMS: Registry["Item"] = Registry("item", "gradveil_studies.paper")


@dataclass(frozen=True)
class Context:
    """What an item is run with."""

    data: str | None = None  # folder with the data sets
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scale: Literal["quick", "full"] = "quick"
    seeds: Seeds = field(default_factory=Seeds)
    out: Path | None = None  # folder of the run, for what the units of an item share

    @property
    def full(self) -> bool:
        return self.scale == "full"


def papers_defense(spec: str, method: str = "exact") -> Defense:
    """Return the defence of a spec; scores are exact, as the paper's are, where the spec leaves the method open."""
    built: Any = build_defense(spec)
    defense: Defense = replace(built, method=method) if getattr(built, "method", None) == "auto" else built
    return defense


@dataclass(frozen=True)
class Judgement:
    """Whether a claim of the paper was seen, by a rule that anybody can apply to the rows."""

    claim: str
    status: str  # "reproduced", "not reproduced", "reproduced only ...", or "not measured"
    rule: str
    paper: str  # the paper's number or sentence
    ours: str  # what was measured


def judge(
    claim: str, holds: bool | str | None, rule: str, paper: str, ours: str, *, control: bool | None = True
) -> Judgement:
    """Return the verdict on a claim.

    ``holds``: whether the rule is met; a text says where alone it is, ``None``: nothing was measured. Where the
    control does not work, or was not run, nothing follows from the rows.
    """
    if holds is None or not control:
        status = "not measured"
    elif isinstance(holds, str):
        status = f"reproduced only {holds}"
    else:
        status = "reproduced" if holds else "not reproduced"
    return Judgement(claim, status, rule, paper, ours)


def in_all(holds: Mapping[str, bool], word: str) -> bool | str | None:
    """Return whether a rule is met in every place; where in some, their names after ``word``; ``None``: no place."""
    names = [name for name, held in holds.items() if held]
    if not holds:
        return None
    return f"{word} {', '.join(names)}" if 0 < len(names) < len(holds) else bool(names)


SUCCESS = 0.01  # clamped MSE under which an image counts as recovered
BLIND = "(blind guess)"  # in place of a defence, in the rows of the floors
MAX_DROP = 0.01  # a smaller loss of accuracy counts as none
CIFAR10 = "normalize=0.4914/0.4822/0.4465/0.247/0.2435/0.2616"  # as in the authors' GS script


def finite(value: torch.Tensor) -> float | None:
    """Return the number, ``None`` for infinity: no image has this r′, so there is no distance to one."""
    return float(value) if bool(torch.isfinite(value)) else None


class Item(ABC):
    """One table or figure. A unit is the smallest piece that is done or not done when a run is resumed."""

    spec_name: ClassVar[str]
    title: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # items whose rows this one reads as well; they come marked by "item"
    source: ClassVar[str | None] = None  # its table in published.toml, where that is not called as the item is
    notes: ClassVar[tuple[str, ...]] = ()  # choices where the paper is silent, and departures from it

    @abstractmethod
    def work(self, context: Context) -> Mapping[str, Any]:
        """Return the work to do, in order: the name of each unit, which its rows keep, and what it says to do."""

    def units(self, context: Context) -> list[str]:
        """Return the names of the units of work, in order."""
        return list(self.work(context))

    @abstractmethod
    def run(self, unit: str, context: Context) -> list[Row]:
        """Do one unit of work."""

    def groups(self, units: Sequence[str], context: Context) -> list[list[str]]:
        """Return the units in the groups that are worth running together; by default each alone."""
        return [[unit] for unit in units]

    def run_group(self, units: Sequence[str], context: Context) -> dict[str, list[Row]]:
        """Do the units of one group; what each yields is what ``run`` gives for it alone."""
        return {unit: self.run(unit, context) for unit in units}

    @abstractmethod
    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return the lines of the table that a person reads; the paper's numbers beside ours."""

    @abstractmethod
    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Return what the rows say of the paper's claims."""

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the figure as ``path`` with the endings .svg and .png; ``False``: the item is a table."""
        return False


@cache
def published() -> dict[str, Any]:
    """Return the paper's own numbers, from ``published.toml``."""
    return tomllib.loads(files("gradveil_studies.paper").joinpath("published.toml").read_text())


Done = tuple[dict[str, list[Row]], float]  # rows by unit, and seconds
MOST_JOBS = 8  # by default: each process loads the data set and PyTorch


def usual_jobs(context: Context) -> int:
    """Return how many processes to use where nobody says: one for each core; on CUDA one, which fills the device."""
    if context.device.type != "cpu":
        return 1
    return min(available_cores(), MOST_JOBS)


def run_groups(item: Item, groups: Sequence[list[str]], context: Context, jobs: int = 1) -> Iterator[Done]:
    """Yield what every group gives, as soon as it is done; with several jobs, not in order.

    Each job is a process of one thread. An error in one ends the run; what was yielded before is kept.
    """
    if jobs == 1 or len(groups) < 2:
        for group in groups:
            yield _timed(item, group, context)
        return
    spawn = get_context("spawn")
    with ignore_sigint(), apart_from_the_folder():  # the pool itself starts a Python, which looks after its locks
        pool = ProcessPoolExecutor(min(jobs, len(groups)), spawn, _begin_worker)
        waiting = [pool.submit(_timed, item, group, context) for group in groups]
    with pool:
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BrokenProcessPool as error:
            raise GradveilError(
                "A worker process ended before its work was done (killed, or out of memory). What was finished is "
                "kept: repeat with --resume, and fewer --jobs."
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    end_with_parent()
    torch.set_num_threads(1)


def _timed(item: Item, group: Sequence[str], context: Context) -> Done:
    start = time.perf_counter()
    return item.run_group(group, context), time.perf_counter() - start
