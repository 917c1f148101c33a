"""What the rows of the items hold, as typed values read once from the file, and the cases that attack rows make."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan
from statistics import fmean, median
from typing import Any, Self

from gradveil.metrics import Interval, interval, rate
from gradveil.protection.defense import build as build_defense
from gradveil.registry import Spec, describe, parse
from gradveil.threats.rows import OBLIVIOUS, group
from gradveil_studies.paper.base import BLIND, MAX_DROP, SUCCESS, Row

KNOWING = "knowing"  # of the servers, those that know the defence
GUESS = "mean image"  # the blind guess that everything is held against
HIDDEN = "neither MSE (clamped) nor SSIM better than answering with the mean image, means over the images"


@dataclass(frozen=True)
class Record:
    """A row of some item; what the file holds beyond the fields is left out."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__ if name in row})

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
    parsed = parse(describe(build_defense(spec)))
    return str(Spec(parsed.name, {k: v for k, v in parsed.settings.items() if k != "method"}))


@dataclass(frozen=True)
class Case:
    """One defence and one server on one panel: what the server gets, and what the defence costs."""

    panel: str
    defense: str
    server: str
    rows: tuple[Measured, ...]
    mse: Interval  # clamped, pixels in [0, 1]
    papers_mse: float  # the median in the paper's unit: unclamped (DLG), in standard deviations of the data (GS)
    success: Interval
    identified: Interval
    ssim: float
    blind: float  # clamped MSE of the mean image on the same images
    blind_ssim: float
    accuracy: Interval | None
    lost: float | None  # accuracy of the undefended model less this one, over the seeds that both were run with

    @property
    def family(self) -> str:
        return family(self.defense)

    @property
    def kind(self) -> str:
        return OBLIVIOUS if self.server == OBLIVIOUS else KNOWING

    @property
    def got(self) -> str:
        return f"MSE {self.mse.mean:.4f}, told apart {self.identified.mean:.0%}"

    @property
    def hidden(self) -> bool:
        return self.mse.mean >= self.blind and self.ssim <= self.blind_ssim

    @property
    def free(self) -> bool | None:
        return None if self.lost is None else self.lost <= MAX_DROP


def cases(rows: Sequence[Measured], accuracy: Sequence[Trained] = ()) -> list[Case]:
    """Return every case of the rows, in order, with the accuracy that belongs to it.

    Accuracies come from the ``accuracy`` item and are joined by data set, family of networks (``lenet``, ``convnet``)
    and defence. The family only, since the networks that the attacks are run on (untrained; sigmoid and uniform
    weights for DLG) hardly train, and those that train are not those that DLG works on. A case without such rows
    has no accuracy and is listed as "not measured".
    """
    groups = group(rows, "panel", "defense", "server")
    found = []
    for (panel, defense, server), mine in groups.items():
        if defense == BLIND:
            continue
        place = mine[0].dataset, mine[0].model
        scores, control = (accuracies(accuracy, *place, d) for d in (defense, "none"))
        guess = groups.get((panel, BLIND, GUESS), [])
        found.append(
            Case(
                panel,
                defense,
                server,
                tuple(mine),
                interval([r.mse for r in mine]),
                median(r.papers_mse for r in mine),
                rate([r.recovered for r in mine]),
                rate([r.identified for r in mine]),
                interval([r.ssim for r in mine]).mean,
                interval([r.mse for r in guess]).mean,
                interval([r.ssim for r in guess]).mean,
                interval(list(scores.values())) if scores else None,
                paired_loss(control, scores),
            )
        )
    return found


def accuracies(rows: Sequence[Trained], dataset: str, model: str, defense: str) -> dict[int, float]:
    """Return the final accuracy by seed of what belongs to a data set, a network family and a defence."""
    panel = f"{network_family(model)}-{dataset}"  # other panels are controls of their own
    same = same_defense(defense)
    return last_round(r for r in rows if r.panel == panel and same_defense(r.defense) == same)


def network_family(model: str) -> str:
    """Return ``lenet`` or ``convnet`` for any spec of those networks."""
    return family(model).partition("_")[0]


def control_works(found: Sequence[Case], panel: str) -> bool | None:
    """Return whether the attack recovers at least half of the undefended images; ``None``: not measured."""
    control = [case for case in found if case.panel == panel and case.defense == "none"]
    return control[0].success.mean >= 0.5 if control else None


def strongest(found: Sequence[Case], kind: str) -> list[Case]:
    """Return, per panel and defence, the case of this kind of server with the lowest MSE: what is known to work."""
    mine = [case for case in found if case.kind == kind or case.defense == "none"]
    return [min(same, key=lambda case: case.mse.mean) for same in group(mine, "panel", "defense").values()]
