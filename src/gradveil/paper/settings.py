"""One setting of the trade-off figure, from its rows: what the server gets, and what the defence costs.

Accuracies come from the ``accuracy`` item and are joined by data set, family of networks (``lenet``, ``convnet``)
and defence. The family only, since the networks that the attacks are run on (untrained; sigmoid and uniform
weights for DLG) hardly train, and those that train are not those that DLG works on. A setting without such rows
has no accuracy and is listed as "not measured".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from gradveil.metrics import Interval, interval, rate
from gradveil.paper.accuracy import paired_loss
from gradveil.paper.attack_points import same_defense
from gradveil.paper.base import BLIND, MAX_DROP, SUCCESS, Row

GUESS = "mean image"  # the blind guess that everything is held against
NAIVE, KNOWING = "naive", "knowing"


@dataclass(frozen=True)
class Case:
    """One defence and one server on one panel."""

    panel: str
    defense: str
    server: str
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
        """The defence without its strength."""
        return self.defense.partition(":")[0]

    @property
    def kind(self) -> str:
        """Whether the server knows the defence."""
        return NAIVE if self.server == NAIVE else KNOWING

    @property
    def hidden(self) -> bool:
        """Whether the image is unrecognisable, by the rule ``HIDDEN``."""
        return self.mse.mean >= self.blind and self.ssim <= self.blind_ssim

    @property
    def free(self) -> bool | None:
        """Whether the defence costs no accuracy; ``None``: not measured."""
        return None if self.lost is None else self.lost <= MAX_DROP


HIDDEN = "neither MSE (clamped) nor SSIM better than answering with the mean image, means over the images"


def settings(rows: Sequence[Row], accuracy: Sequence[Row]) -> list[Case]:
    """Return every setting of the trade-off rows, in order, with the accuracy that belongs to it."""
    found = []
    grouped: dict[tuple[str, str, str], list[Row]] = {}
    for r in rows:
        grouped.setdefault((r["panel"], r["defense"], r["server"]), []).append(r)
    for (panel, defense, server), mine in grouped.items():
        if defense == BLIND:
            continue
        scores = accuracies(accuracy, mine[0]["dataset"], mine[0]["model"], defense)
        control = accuracies(accuracy, mine[0]["dataset"], mine[0]["model"], "none")
        measured = interval(list(scores.values())) if scores else None
        lost = paired_loss(control, scores)
        guess = grouped.get((panel, BLIND, GUESS), [])
        units = [papers_unit(r) for r in mine]
        found.append(
            Case(
                panel,
                defense,
                server,
                interval([r["mse"] for r in mine]),
                median(units),
                rate([float(r["mse"] < SUCCESS) for r in mine]),
                rate([r["identified"] for r in mine]),
                interval([r["ssim"] for r in mine]).mean,
                interval([r["mse"] for r in guess]).mean,
                interval([r["ssim"] for r in guess]).mean,
                measured,
                lost,
            )
        )
    return found


def select(rows: Sequence[Row], panel: str, defense: str, server: str) -> list[Row]:
    """Return the rows of one setting."""
    return [r for r in rows if (r["panel"], r["defense"], r["server"]) == (panel, defense, server)]


def papers_unit(row: Row) -> float:
    """Return a row's MSE as the authors' code reports it.

    DLG: of what the search left, unclamped (clamped where an attack keeps to the data range). GS: of normalised
    images.
    """
    if row["attack"] == "gs":
        return float(row["normalised_mse"])
    return float(row["unclamped_mse"] if "unclamped_mse" in row else row["mse"])


def accuracies(rows: Sequence[Row], dataset: str, model: str, defense: str) -> dict[int, float]:
    """Return the final accuracy by seed of what belongs to a data set, a network family and a defence."""
    panel, spelled = f"{network_family(model)}-{dataset}", _spelled(defense)  # other panels are controls of their own
    return {
        r["seed"]: float(r["accuracy"])
        for r in rows
        if r["round"] == r["rounds"] and r["panel"] == panel and _spelled(r["defense"]) == spelled
    }


_spelled = cache(same_defense)


def network_family(model: str) -> str:
    """Return ``lenet`` or ``convnet`` for any spec of those networks."""
    return model.partition(":")[0].partition("_")[0]


def control_works(found: Sequence[Case], panel: str) -> bool | None:
    """Return whether the attack recovers at least half of the undefended images; ``None``: not measured."""
    control = [s for s in found if s.panel == panel and s.defense == "none"]
    return control[0].success.mean >= 0.5 if control else None


def strongest(found: Sequence[Case], kind: str) -> list[Case]:
    """Return, per panel and defence, the setting of this kind of server with the lowest MSE: what is known to work."""
    best: dict[tuple[str, str], Case] = {}
    for s in found:
        key = (s.panel, s.defense)
        if (s.kind == kind or s.defense == "none") and (key not in best or s.mse.mean < best[key].mse.mean):
            best[key] = s
    return list(best.values())


def own(rows: Sequence[Row]) -> list[Row]:
    """Return an item's own rows."""
    return [r for r in rows if "item" not in r]


def of_item(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows that came from another item."""
    return [r for r in rows if r.get("item") == name]
