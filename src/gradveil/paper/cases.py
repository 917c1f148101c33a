"""One case of the trade-off figure, from its rows: what the server gets, and what the defence costs.

Accuracies come from the ``accuracy`` item and are joined by data set, family of networks (``lenet``, ``convnet``)
and defence. The family only, since the networks that the attacks are run on (untrained; sigmoid and uniform
weights for DLG) hardly train, and those that train are not those that DLG works on. A case without such rows
has no accuracy and is listed as "not measured".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradveil.experiments.rows import group
from gradveil.metrics import Interval, interval, rate
from gradveil.paper.base import BLIND, MAX_DROP
from gradveil.paper.rows import KNOWING, NAIVE, Measured, Trained, family, last_round, paired_loss, same_defense

GUESS = "mean image"  # the blind guess that everything is held against
HIDDEN = "neither MSE (clamped) nor SSIM better than answering with the mean image, means over the images"


@dataclass(frozen=True)
class Case:
    """One defence and one server on one panel."""

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
        """The defence without its strength."""
        return family(self.defense)

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


def cases(rows: Sequence[Measured], accuracy: Sequence[Trained] = ()) -> list[Case]:
    """Return every case of the rows, in order, with the accuracy that belongs to it."""
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
