"""What the rows of the items hold, as typed values: read once from the file's dictionaries, then taken by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import nan
from statistics import fmean
from typing import Any, Self

from gradveil.defenses.base import DEFENSES
from gradveil.defenses.base import build as build_defense
from gradveil.metrics import Interval
from gradveil.paper.base import SUCCESS, Row
from gradveil.registry import Spec, describe, parse

NAIVE, KNOWING = "naive", "knowing"  # servers: what arrives is taken as it is; the defence is known


@dataclass(frozen=True)
class Record:
    """A row of some item; what the file holds beyond the fields is left out."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Read one row."""
        return cls(**{field.name: row[field.name] for field in fields(cls) if field.name in row})

    @classmethod
    def read(cls, rows: Iterable[Row], item: str | None = None) -> list[Self]:
        """Read an item's own rows, or those that came from another item."""
        return [cls.of(row) for row in rows if row.get("item") == item]


@dataclass(frozen=True)
class Measured(Record):
    """One image, attacked or guessed blindly: under which defence, by which server, and what came of it."""

    panel: str = ""
    dataset: str = ""
    model: str = ""
    defense: str = ""
    server: str = ""
    attack: str = ""
    image: int = 0
    mse: float = nan  # clamped, pixels in [0, 1]
    psnr: float = nan
    ssim: float = nan
    identified: float = nan  # 1: told from the other images
    unclamped_mse: float | None = None  # as the search left it; None: the attack keeps to the data range
    normalised_mse: float = nan  # in standard deviations of the data
    objective: float = nan
    picture: str | None = None

    @property
    def recovered(self) -> bool:
        """Whether the image counts as recovered."""
        return self.mse < SUCCESS

    @property
    def papers_mse(self) -> float:
        """The MSE as the authors' code reports it: unclamped (DLG), of normalised images (GS)."""
        if self.attack == "gs":
            return self.normalised_mse
        return self.mse if self.unclamped_mse is None else self.unclamped_mse


@dataclass(frozen=True)
class Trained(Record):
    """A global model after some round of training under a defence."""

    panel: str
    defense: str
    seed: int
    round: int
    rounds: int  # of the whole training
    accuracy: float
    dataset: str = ""
    model: str = "lenet"


def last_round(rows: Iterable[Trained]) -> dict[int, float]:
    """Return each seed's accuracy after the last round."""
    return {r.seed: r.accuracy for r in rows if r.round == r.rounds}


def paired_loss(control: Mapping[int, float], mine: Mapping[int, float]) -> float | None:
    """Return how much lower the mean accuracy is than the control's, over the seeds that both have; else None."""
    seeds = control.keys() & mine.keys()
    return fmean(control[s] - mine[s] for s in seeds) if seeds else None


def spread(values: Iterable[float]) -> Interval:
    """Return the mean, the lowest and the highest."""
    numbers = list(values)
    return Interval(fmean(numbers), min(numbers), max(numbers), len(numbers))


def family(spec: str) -> str:
    """Return a spec without its settings: the defence without its strength."""
    return spec.partition(":")[0]


def level(defense: str) -> float:
    """Return the one setting of a defence, its strength."""
    return float(defense.partition("=")[2])


@cache
def same_defense(spec: str) -> str:
    """Return a defence's spec in one spelling, so that rows of several items can be joined.

    How the scores are computed (``method``) is left out: it decides the time they take.
    """
    parsed = parse(describe(build_defense(DEFENSES.current(spec))))
    return str(Spec(parsed.name, {k: v for k, v in parsed.settings.items() if k != "method"}))
