"""Both theorems on the runs of the figures: what they promise beside what was attained."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from gradveil.data import load
from gradveil.models import build
from gradveil.modules import find_layer, representation
from gradveil.ranges import Count
from gradveil.representation.certify import certify
from gradveil.representation.problem import SCOPE, Kind, blind_mse, largest_mse
from gradveil.threats.rows import OBLIVIOUS, group
from gradveil.threats.trial import PUBLIC
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, finite, judge, papers_defense
from gradveil_studies.paper.convergence import BoundedGap, Convergence, by_setting, read
from gradveil_studies.paper.figures import PAPER, PROMISED, REACHED, SOUND, Dot, dot_panels
from gradveil_studies.paper.panels import AttackPanel
from gradveil_studies.paper.rows import Measured, Record, level
from gradveil_studies.paper.tradeoff import Tradeoff

KINDS: tuple[Kind, ...] = ("local", "global", "box", "reach")


@dataclass(frozen=True)
class Promise(Record):
    """What theorem 1 promises for one image under one defence, and what the servers attained; all as MSE."""

    panel: str
    defense: str
    image: int
    local: float  # as printed
    sound: float  # the better of the global and the box version
    unreachable: bool  # no image has r′
    blind: float
    largest: float
    oblivious: float | None = None  # None: not measured
    unclamped: float | None = None  # the oblivious server's, in the paper's unit
    knowing: float | None = None  # the best of the servers that know

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        return super().of({**row, "sound": max(row["global"], row["box"])})


@ITEMS.register("bounds")
@dataclass(frozen=True)
class Bounds(Item):
    """Theorem 1 (as printed, and two sound versions) on the DLG images; theorem 2 on the convergence runs."""

    title = "The bounds of theorems 1 and 2 beside what was measured on the same runs"
    needs: ClassVar[tuple[str, ...]] = ("tradeoff", "convergence")
    notes: ClassVar[tuple[str, ...]] = (
        "Theorem 1 as printed (local) is a first-order figure, no bound; global and box are its sound versions, by a "
        "Lipschitz constant of f everywhere and on the data range; reach asks whether any image has r′ at all.",
        SCOPE,
        "Theorem 2 as printed has a counterexample; theorem A is the corrected statement, here an estimate: with the "
        "largest bias of the stored rounds, where it needs that of every iterate.",
    )

    images: Count = 32  # the first of the trade-off's; quick: 2
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    networks: tuple[str, str] = ("lenet", "convnet")

    def work(self, context: Context) -> dict[str, AttackPanel]:
        panels = Tradeoff(datasets=self.datasets, networks=self.networks).panels(context)
        return {name: panel for name, panel in panels.items() if not panel.is_gs}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Certify the first images of a panel at every share of ours: one call a kind, so that f is bounded once."""
        panel = self.work(context)[unit]
        dataset = load(panel.dataset, context.data)
        model = build(panel.model, dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
        count = self.images if context.full else min(self.images, 2)
        x = dataset.train.sample(count, context.seeds("images")).inputs
        public = dataset.test.sample(PUBLIC, context.seeds("public")).inputs
        floors = blind_mse(x, public.mean(0)), largest_mse(x)
        shares = [d for d in panel.defenses if d.startswith("representation")]
        layer = find_layer(model)
        r = representation(model, layer, x).detach()
        perturbed = [_perturbed(model, layer, x, r, d, context) for d in shares]
        certified = {
            kind: certify(model, layer, x.repeat(len(shares), 1, 1, 1), torch.cat(perturbed), kind=kind)
            for kind in KINDS
        }
        rows = []
        for s, defense in enumerate(shares):
            for i in range(len(x)):
                at = s * len(x) + i
                row: Row = {"panel": unit, "defense": defense, "image": i}
                row |= {kind: finite(certificate.to_mse()[at]) for kind, certificate in certified.items()}
                row["unreachable"] = bool(certified["reach"].details["unreachable"][at])
                rows.append(row | {"blind": float(floors[0][i]), "largest": float(floors[1][i])})
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return bounds and attained MSE per panel and share, then theorem 2's line for every defended run."""
        table: list[Row] = []
        for (panel, defense), mine in group(_promises(rows), "panel", "defense").items():
            table.append(
                {
                    "theorem": "1",
                    "setting": f"{panel}, {defense}",
                    "images": len(mine),
                    "as printed": _mean(p.local for p in mine),
                    "sound": _mean(p.sound for p in mine),
                    "r′ unreachable": f"{fmean(p.unreachable for p in mine):.0%}",
                    "attained, oblivious": _mean(p.oblivious for p in mine),
                    "attained, oblivious, unclamped": _mean(p.unclamped for p in mine),
                    "attained, knowing": _mean(p.knowing for p in mine),
                    "blind guess": _mean(p.blind for p in mine),
                    "largest possible": _mean(p.largest for p in mine),
                }
            )
        for setting, end in _theorem2(rows).items():
            line = {"theorem": "2", "setting": setting, "as printed": f"{end.printed:.3g}"}
            table.append(line | {"sound": f"{end.theorem_a} (estimate)", "attained, oblivious": f"{end.gap:.4f}"})
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge theorem 1's figure against both servers, its sound versions, what they are worth, and theorem 2's."""
        promised = _promises(rows)
        without = "the server that does not know the defence"
        local = "as printed (local)"
        return [
            _holds(local, [(p.local, p.oblivious) for p in promised], without),
            _holds(local, [(p.local, p.unclamped) for p in promised], "the same, unclamped as in the paper"),
            _holds(local, [(p.local, p.knowing) for p in promised], "the server that knows the defence"),
            _holds("sound version (global/box)", [(p.sound, p.oblivious) for p in promised], without),
            _says_more(promised),
            _second(list(_theorem2(rows).values())),
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw theorem 1's figures and what the servers attained, per panel and share, means over images."""
        panels: dict[str, list[Dot]] = {}
        lines: dict[str, dict[str, float]] = {}
        for (panel, defense), mine in group(_promises(rows), "panel", "defense").items():
            shown = {
                "as printed": (PROMISED, [p.local for p in mine]),
                "sound": (SOUND, [p.sound for p in mine]),
                "oblivious server": (REACHED, [p.oblivious for p in mine if p.oblivious is not None]),
                "knowing server": (PAPER, [p.knowing for p in mine if p.knowing is not None]),
            }
            dots = [Dot.of(f"{level(defense):.0%}, {n}", values, look) for n, (look, values) in shown.items() if values]
            panels.setdefault(panel, []).extend(dots)
            lines[panel] = {"blind guess (mean image)": fmean(p.blind for p in mine)}
        dot_panels(path, panels, "MSE, mean and range over images", log=True, lines=lines, columns=2)
        return True


def _perturbed(
    model: torch.nn.Module, layer: str, x: Tensor, r: Tensor, defense: str, context: Context
) -> Tensor:  # (N, L)
    built = papers_defense(defense)
    each = [
        built.perturb(model, layer, x[i : i + 1], r[i : i + 1], context.seeds("defense", defense, i))
        for i in range(len(x))
    ]
    return torch.cat(each).detach().flatten(1)


def _promises(rows: Sequence[Row]) -> list[Promise]:
    """Return the item's own rows, each with what the servers of the trade-off figure attained on its image."""
    problems = group(Measured.read(rows, "tradeoff"), "panel", "defense", "image")
    promises = []
    for p in Promise.read(rows):
        mine = problems.get((p.panel, p.defense, p.image), [])
        knowing = min((r.mse for r in mine if r.server != OBLIVIOUS), default=None)
        p = replace(p, knowing=knowing)
        for r in mine:
            if r.server == OBLIVIOUS:
                p = replace(p, oblivious=r.mse, unclamped=r.papers_mse)
        promises.append(p)
    return promises


def _mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{fmean(known):.3g}" if known else "not measured"


def _holds(name: str, pairs: Sequence[tuple[float, float | None]], who: str) -> Judgement:
    kept = [attained >= promised for promised, attained in pairs if attained is not None]
    return judge(
        f"Theorem 1, {name}, bounds the error of {who}",
        all(kept) if kept else None,
        "attained MSE at least the figure, on every image and share",
        "||X - X′|| ≥ ||r - r′|| / ||∇f||",
        f"{sum(kept)} of {len(kept)}" if kept else "-",
    )


def _says_more(promised: Sequence[Promise]) -> Judgement:
    ratios = [p.sound / p.blind for p in promised]
    return judge(
        "Theorem 1's sound version promises more than a blind guess gets",
        min(ratios) >= 1 if ratios else None,
        "certified MSE at least that of the mean image, on every image and share",
        "not compared",
        f"at most {max(ratios):.2g} of it" if ratios else "-",
    )


def _theorem2(rows: Sequence[Row]) -> dict[str, BoundedGap]:
    """Return where the defended runs of the convergence item ended, by setting."""
    stored, known = read(rows, "convergence")
    settings = by_setting(r for r in stored if r.defense == "ours")
    return {name: Convergence().bounded(mine, known) for name, mine in settings.items()} if known else {}


def _second(ends: Sequence[BoundedGap]) -> Judgement:
    kept = [end.gap <= end.printed for end in ends]
    loose = [end.printed / max(end.gap, 1e-12) for end in ends]
    return judge(
        "Theorem 2's figure lies above the gap on these runs (it is no bound in general)",
        all(kept) if kept else None,
        "F(W_T) - F* at most the printed figure, in every defended run",
        "E F(W_T) - F* ≤ (2κ/(γ+T)) ((Q + C)/μ + ...)",
        f"{sum(kept)} of {len(kept)}; {min(loose):.2g} to {max(loose):.2g} times the gap" if kept else "-",
    )
