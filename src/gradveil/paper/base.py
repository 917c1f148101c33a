"""What one table or figure of the paper is: units of work in, rows out, a verdict by a stated rule."""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from gradveil.registry import Registry
from gradveil.seeds import Seeds

Row = dict[str, Any]
ITEMS: Registry["Item"] = Registry("item", "gradveil.paper")


@dataclass(frozen=True)
class Context:
    """What an item is run with."""

    data: str | None = None  # folder with the data sets
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    scale: Literal["quick", "full"] = "quick"
    seeds: Seeds = field(default_factory=Seeds)

    @property
    def full(self) -> bool:
        """Whether the paper's sizes are asked for."""
        return self.scale == "full"


@dataclass(frozen=True)
class Judgement:
    """Whether a claim of the paper was seen, by a rule that anybody can apply to the rows."""

    claim: str
    status: str  # "reproduced", "not reproduced", "reproduced only ...", or "not measured"
    rule: str
    paper: str  # the paper's number or sentence
    ours: str  # what was measured


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
    def units(self, context: Context) -> list[str]:
        """Return the keys of the work to do, in order."""

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
    return tomllib.loads(files("gradveil.paper").joinpath("published.toml").read_text())
