"""Panels of the figures on attacks: each a network, a data set, an attack, and the defences that are tried on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gradveil.paper.base import BLIND, CIFAR10, Context, Row
from gradveil.paper.points import FLOORS, AttackPoints, Point, servers

SCALES = (0.0001, 0.001, 0.01, 0.1)
NORMALISED = f"convnet:{CIFAR10}"
GS_STEPS = 500
CONTRAST = 0.05  # of neighbouring pixels: what sets the smoothness of the GS server that knows of noise


@dataclass(frozen=True)
class AttackPanel:
    """One panel: what is attacked, how, and under which defences."""

    name: str
    dataset: str
    model: str
    attack: str
    images: int
    defenses: tuple[str, ...]
    against_noise: str = "newton"  # the attack of a server that knows of noise
    is_gs: bool = False  # GS: the server knows the label
    weights: int = 0  # which draw of the initial weights

    def points(self, context: Context) -> AttackPoints:
        """Return the scene; kept, so that the units of a run share it and what was solved in it."""
        return _points(self.dataset, self.model, self.attack, self.images, context, self.is_gs, self.weights)

    def rows(
        self, wanted: Sequence[str], context: Context, pictures: int = 0, without: Sequence[str] = ()
    ) -> dict[str, list[Row]]:
        """Attack the images under some defences (``FLOORS``: guess them blindly), by every server but ``without``.

        All are solved together; the rows come by defence.
        """
        points = self.points(context)
        known = [(d, s) for d in wanted if d != FLOORS for s in servers(d, points.scene.model, self.against_noise)]
        asked = [Point(d, s) for d, s in known if s.name not in without]
        rows = (points.floors() if FLOORS in wanted else []) + (points.rows(asked, pictures) if asked else [])
        place: Row = {"panel": self.name, "dataset": self.dataset, "model": self.model}
        return {
            what: [place | row for row in rows if row["defense"] == (BLIND if what == FLOORS else what)]
            for what in wanted
        }


def gs_attack(steps: int, context: Context) -> str:
    """Return the GS attack of the figures: products are rounded where that is faster."""
    return f"gs:steps={steps}" + (",tf32=true" if context.device.type == "cuda" else "")


_points = lru_cache(maxsize=4)(AttackPoints.of)  # by what is attacked and how: items that agree on it share the work


def grid(ours: Sequence[float], pruning: Sequence[float], scales: Sequence[float] = SCALES) -> tuple[str, ...]:
    """Return the defences: none, ours over its shares, the random control, pruning, and both kinds of noise."""
    return (
        "none",
        *(f"representation:share={s}" for s in ours),
        "random_mask:share=0.4",
        *(f"pruning:share={s}" for s in pruning),
        *(f"{noise}:scale={s}" for noise in ("gaussian", "laplace") for s in scales),
    )


FULL = {"dlg": grid((0.01, 0.05, 0.1, 0.2, 0.4), (0.1, 0.4, 0.8)),
        "gs": grid((0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8), (0.1, 0.4, 0.8, 0.9))}  # fmt: skip
QUICK = {"dlg": grid((0.01, 0.4), (0.8,), (0.01,)), "gs": grid((0.4, 0.8), (0.8,), (0.01,))}
