"""Every certificate on the paper's untrained networks: what is estimated, what is proved, what an inversion reaches."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf, nan
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import torch

from gradveil.data import load
from gradveil.models import build
from gradveil.modules import find_layer, representation
from gradveil.ranges import Count, Share
from gradveil.representation.certify import certify, readable_p
from gradveil.representation.problem import SCOPE, Certificate, Kind, blind_mse, largest_mse
from gradveil.threats.rows import group
from gradveil.threats.trial import PUBLIC
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, finite, judge, papers_defense
from gradveil_studies.paper.figures import PROMISED, REACHED, SOUND, Dot, dot_panels
from gradveil_studies.paper.rows import Record

NETWORKS = {"sigmoid": "lenet", "relu": "lenet:activation=relu,init=default"}
KINDS: dict[str, tuple[Kind, ...]] = {
    "2": ("local", "global", "box", "reach", "empirical"),
    "1": ("local", "global", "box", "reach"),
    "inf": ("local", "global", "box", "reach"),
}
LOOKS = {"local": PROMISED, "global": SOUND, "box": SOUND, "reach": SOUND, "empirical": REACHED}


@dataclass(frozen=True)
class CertifyJob:
    """One network with one draw of its weights, in one norm."""

    dataset: str
    network: str
    p: str
    draw: int


@dataclass(frozen=True)
class Certified(Record):
    """One kind of certificate for one image."""

    dataset: str
    network: str
    p: str
    draw: int
    kind: str
    image: int
    mse: float | None  # None: infinite, no image has this r′
    blind: float
    largest: float  # that an image can have
    distance: float = nan  # ‖r - r′‖
    residual: float = nan  # ‖f(X′) - r′‖ that an inversion leaves
    unreachable: float = 0.0  # 1: no image has r′
    proved: float | None = None  # infinite as well; for what an inversion leaves

    @property
    def number(self) -> float:
        return inf if self.mse is None else self.mse

    @property
    def case(self) -> tuple[int, int]:
        return self.draw, self.image


@ITEMS.register("certificates")
@dataclass(frozen=True)
class Certificates(Item):
    """All kinds in all norms, 40 % of the representation zeroed; the largest and the blind MSE beside them."""

    title = "Theorem 1 and its sound relatives (untrained LeNet, 40 % zeroed)"
    notes: ClassVar[tuple[str, ...]] = (
        "local is the theorem as printed, a first-order estimate; global, box and reach are proved.",
        SCOPE,
    )
    source = "bounds"

    share: Share = 0.4
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    images: Count = 2  # of each draw of the weights
    draws: Count = 3  # of the weights: the figures differ more between networks than between images; quick: 1

    def work(self, context: Context) -> dict[str, CertifyJob]:
        """Return data set, network, norm and draw of the weights; quick: one draw, and the first data set only."""
        draws = range(self.draws if context.full else 1)
        datasets = self.datasets if context.full else self.datasets[:1]
        return {
            f"{d} {net} p={p} draw={i}": CertifyJob(d, net, p, i)
            for d in datasets for net in NETWORKS for p in KINDS for i in draws
        }  # fmt: skip

    def run(self, unit: str, context: Context) -> list[Row]:
        """Certify the images in every kind that the norm has."""
        job = self.work(context)[unit]
        p = readable_p(job.p)
        source = load(job.dataset, context.data)
        model = build(
            NETWORKS[job.network],
            source.input_shape,
            source.num_classes,
            seed=context.seeds.number("weights", job.draw),
        )
        x = source.train.sample(self.images, context.seeds("images")).inputs
        public = source.test.sample(PUBLIC, context.seeds("public")).inputs
        floors = {"blind": blind_mse(x, public.mean(0)), "largest": largest_mse(x)}
        layer = find_layer(model)
        rng = context.seeds("defense")
        defense = papers_defense(f"representation:share={self.share}")
        r = representation(model, layer, x)
        perturbed = defense.perturb(model, layer, x, r, rng).detach().flatten(1)
        rows = []
        for kind in KINDS[job.p]:
            certificate = certify(model, layer, x, perturbed, p, kind, rng=context.seeds("inversion"))
            figures = {"mse": certificate.to_mse(), **floors, **_details(certificate)}
            if kind == "empirical":  # what is proved of an answer that leaves this residual
                left = certificate.details["residual"]
                figures["proved"] = certify(model, layer, x, perturbed, p, "residual", residual=left).to_mse()
            name: Row = asdict(job) | {"kind": kind}
            rows += [
                name | {"image": i} | {key: finite(values[i]) for key, values in figures.items()} for i in range(len(x))
            ]
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per network and norm: every kind's MSE, mean (lowest to highest) over draws and images."""
        table = []
        for (dataset, network, p), mine in group(Certified.read(rows), "dataset", "network", "p").items():
            kinds = {kind: found for (kind,), found in group(mine, "kind").items()}
            line: Row = {"network": f"{dataset}, {network}", "p": p, "cases": len({c.case for c in mine})}
            line["local (estimate)"] = _mean(kinds.get("local", []))
            line |= {kind: _mean(kinds.get(kind, [])) for kind in ("global", "box")}
            line["reach"] = _reach(kinds.get("reach", []))
            line["inversion of r′ (‖f(X′)−r′‖ / ‖r−r′‖)"] = _inversion(
                kinds.get("empirical", []), kinds.get("global", [])
            )
            line["mean image"] = f"{fmean(c.blind for c in mine):.3g}"
            line["largest possible"] = f"{fmean(c.largest for c in mine):.3g}"
            table.append(line)
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the printed figure against what images can have, and the sound ones against what was reached."""
        certified = Certified.read(rows)
        above = [c.number > c.largest for c in certified if c.kind == "local" and c.p == "2"]
        held = [c.number >= (inf if c.proved is None else c.proved) for c in certified if c.kind == "empirical"]
        verdicts = []
        if above:
            claim = "Theorem 1's figure is an MSE that images can have"
            rule = "the figure (p = 2) at most the largest MSE that any image in [0, 1] can have, in every case"
            ours = f"above it on {sum(above)} of {len(above)} cases"
            verdicts.append(judge(claim, not any(above), rule, "a bound", ours))
        if held:
            claim = "The sound bounds hold for what an inversion of r′ finds"
            rule = "MSE of the inversion at least the sound bound for its residual, in every case"
            ours = f"held on {sum(held)} of {len(held)} cases"
            verdicts.append(judge(claim, all(held), rule, "not in the paper", ours))
        return verdicts

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw what every kind promises for p = 2, mean and range over draws and images, and what images can have."""
        panels: dict[str, list[Dot]] = {}
        lines = {}
        euclidean = [c for c in Certified.read(rows) if c.p == "2"]
        for (dataset, network), mine in group(euclidean, "dataset", "network").items():
            name = f"{dataset}, {network}"
            for kind, look in LOOKS.items():
                values = [c.mse for c in mine if c.kind == kind and c.mse is not None]
                if values and max(values) > 0:
                    panels.setdefault(name, []).append(Dot.of(kind, values, look))
            lines[name] = {
                "blind guess (mean image)": fmean(c.blind for c in mine),
                "largest that an image can have": fmean(c.largest for c in mine),
            }
        dot_panels(path, panels, "MSE (p = 2)", log=True, lines=lines, columns=2)
        return True


def _details(certificate: Certificate) -> dict[str, torch.Tensor]:
    wanted = ("distance", "residual", "lipschitz", "norm", "unreachable", "least_residual")
    return {"bound": certificate.bound} | {k: v for k, v in certificate.details.items() if k in wanted}


def _mean(certified: Sequence[Certified]) -> str:
    values = [c.number for c in certified]
    if not values:
        return ""
    between = f" ({min(values):.2g} to {max(values):.2g})" if len(values) > 1 else ""
    return f"{fmean(values):.2g}{between}"


def _reach(certified: Sequence[Certified]) -> str:
    if not certified:
        return ""
    rest = [c.number for c in certified if not c.unreachable]
    if not rest:
        return "no image has r′"
    none = len(certified) - len(rest)
    return f"{fmean(rest):.3g}" + (f"; no image has r′ for {none}" if none else "")


def _inversion(inverted: Sequence[Certified], others: Sequence[Certified]) -> str:
    """Return the mean MSE of the inversions, and how much of ‖r−r′‖ they leave."""
    if not inverted:
        return ""
    sizes = {c.case: c.distance for c in others}
    left = fmean(c.residual / sizes[c.case] for c in inverted)
    return f"{fmean(c.number for c in inverted):.3g} ({left:.2f})"
