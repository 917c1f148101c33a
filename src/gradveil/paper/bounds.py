"""Both theorems on the runs of the figures: what they promise beside what was attained."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.certificates.base import SCOPE, Kind, blind_mse, largest_mse
from gradveil.certificates.certify import certify
from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.layers.modules import find_layer, representation
from gradveil.metrics import interval
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row, finite
from gradveil.paper.convergence import Convergence
from gradveil.paper.figures import PAPER, PROMISED, REACHED, Dot, dot_panels
from gradveil.paper.figures import SOUND as SOUND_LOOK
from gradveil.paper.settings import NAIVE, of_item, own, papers_unit
from gradveil.paper.tradeoff import AttackPanel, Tradeoff

KINDS: tuple[Kind, ...] = ("local", "global", "box", "reach")
SOUND = ("global", "box")


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
        "Theorem 2 as printed has a counterexample; theorem A is the corrected statement.",
    )

    images: int = 32  # the first of the trade-off's; quick: 2
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    networks: tuple[str, ...] = ("lenet", "convnet")

    def panels(self, context: Context) -> dict[str, AttackPanel]:
        """Return the DLG panels of the trade-off figure."""
        found = Tradeoff(datasets=self.datasets, networks=self.networks).panels(context)
        return {name: panel for name, panel in found.items() if not panel.is_gs}

    def units(self, context: Context) -> list[str]:
        """Return the panels."""
        return list(self.panels(context))

    def run(self, unit: str, context: Context) -> list[Row]:
        """Certify the first images of a panel at every share of ours: one call a kind, so that f is bounded once."""
        panel = self.panels(context)[unit]
        dataset = load(panel.dataset, context.data)
        model = build(panel.model, dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
        order = torch.randperm(len(dataset.train), generator=context.seeds("images"))
        x = dataset.train.batch(order[: self.images if context.full else min(self.images, 2)]).inputs
        public = torch.randperm(len(dataset.test), generator=context.seeds("public"))[:2000]
        floors = blind_mse(x, dataset.test.batch(public).inputs.mean(0)), largest_mse(x)
        shares = [d for d in panel.defenses if d.startswith("representation")]
        layer = find_layer(model)
        r = representation(model, layer, x).detach()
        perturbed = [_perturbed(model, layer, x, r, d, context) for d in shares]
        found = {
            kind: certify(model, layer, x.repeat(len(shares), 1, 1, 1), torch.cat(perturbed), kind=kind)
            for kind in KINDS
        }
        rows = []
        for s, defense in enumerate(shares):
            for i in range(len(x)):
                at = s * len(x) + i
                row: Row = {"panel": unit, "defense": defense, "image": i}
                row |= {k: finite(c.to_mse()[at]) for k, c in found.items()}
                row["unreachable"] = bool(found["reach"].details["unreachable"][at])
                rows.append(row | {"blind": float(floors[0][i]), "largest": float(floors[1][i])})
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return bounds and attained MSE per panel and share, then theorem 2's line for every defended run."""
        table = []
        every = _attained(rows)
        for panel, defense in dict.fromkeys((r["panel"], r["defense"]) for r in own(rows)):
            mine = [r for r in own(rows) if (r["panel"], r["defense"]) == (panel, defense)]
            attained = [every.get(_problem(r), {}) for r in mine]
            table.append(
                {
                    "theorem": "1",
                    "setting": f"{panel}, {defense}",
                    "images": len(mine),
                    "as printed": _mean([r["local"] for r in mine]),
                    "sound": _mean([max(r[k] for k in SOUND) for r in mine]),
                    "r′ unreachable": f"{interval([float(r['unreachable']) for r in mine]).mean:.0%}",
                    "attained, naive": _mean([a["naive"] for a in attained if "naive" in a]),
                    "attained, naive, unclamped": _mean([a["unclamped"] for a in attained if "unclamped" in a]),
                    "attained, knowing": _mean([a["knowing"] for a in attained if "knowing" in a]),
                    "blind guess": _mean([r["blind"] for r in mine]),
                    "largest possible": _mean([r["largest"] for r in mine]),
                }
            )
        for line in _theorem2(rows):
            said = {"theorem": "2", "setting": line["setting"], "as printed": line["printed bound"]}
            table.append(said | {"sound": line["theorem A"], "attained, naive": line["F - F*"]})
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge theorem 1's figure against both servers, its sound versions, what they are worth, and theorem 2's."""
        attained = _attained(rows)
        pairs = [(r, attained.get(_problem(r), {})) for r in own(rows)]
        return [
            _holds(pairs, "as printed", ("local",), "naive", "the server that does not know the defence"),
            _holds(pairs, "as printed", ("local",), "unclamped", "the same, unclamped as in the paper"),
            _holds(pairs, "as printed", ("local",), "knowing", "the server that knows the defence"),
            _holds(pairs, "sound version", SOUND, "naive", "the server that does not know the defence"),
            _says_more(own(rows)),
            _second(_theorem2(rows)),
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw theorem 1's figures and what the servers attained, per panel and share, means over images."""
        every = _attained(rows)
        panels: dict[str, list[Dot]] = {}
        lines: dict[str, dict[str, float]] = {}
        for panel, defense in dict.fromkeys((r["panel"], r["defense"]) for r in own(rows)):
            mine = [r for r in own(rows) if (r["panel"], r["defense"]) == (panel, defense)]
            attained = [every.get(_problem(r), {}) for r in mine]
            shown = {
                "as printed": (PROMISED, [r["local"] for r in mine]),
                "sound": (SOUND_LOOK, [max(r[k] for k in SOUND) for r in mine]),
                "naive server": (REACHED, [a[NAIVE] for a in attained if NAIVE in a]),
                "knowing server": (PAPER, [a["knowing"] for a in attained if "knowing" in a]),
            }
            share = f"{float(defense.partition('=')[2]):.0%}"
            found = [Dot.of(f"{share}, {name}", values, look) for name, (look, values) in shown.items() if values]
            panels.setdefault(panel, []).extend(found)
            lines[panel] = {"blind guess (mean image)": sum(r["blind"] for r in mine) / len(mine)}
        dot_panels(path, panels, "MSE, mean and range over images", log=True, lines=lines, columns=2)
        return True


def _perturbed(
    model: torch.nn.Module, layer: str, x: Tensor, r: Tensor, defense: str, context: Context
) -> Tensor:  # (N, L)
    built = build_defense(defense)
    each = [
        built.perturb(model, layer, x[i : i + 1], r[i : i + 1], context.seeds("defense", defense, i))
        for i in range(len(x))
    ]
    return torch.cat(each).detach().flatten(1)


def _problem(row: Row) -> tuple[str, str, int]:
    return row["panel"], row["defense"], row["image"]


def _attained(rows: Sequence[Row]) -> dict[tuple[str, str, int], dict[str, float]]:
    """Return what the servers of the trade-off figure attained on each image under each defence."""
    every: dict[tuple[str, str, int], dict[str, float]] = {}
    for r in of_item(rows, "tradeoff"):
        found = every.setdefault(_problem(r), {})
        if r["server"] == NAIVE:
            found |= {"naive": r["mse"], "unclamped": papers_unit(r)}
        else:
            found["knowing"] = min(r["mse"], found.get("knowing", float("inf")))
    return every


def _mean(values: Sequence[float]) -> str:
    return f"{interval(values).mean:.3g}" if values else "not measured"


Pairs = Sequence[tuple[Row, dict[str, float]]]


def _holds(pairs: Pairs, name: str, kinds: Sequence[str], server: str, who: str) -> Judgement:
    checks = [(max(r[k] for k in kinds), a[server]) for r, a in pairs if server in a]
    kept = sum(attained >= bound for bound, attained in checks)
    status = "not measured" if not checks else "reproduced" if kept == len(checks) else "not reproduced"
    return Judgement(
        f"Theorem 1, {name} ({'/'.join(kinds)}), bounds the error of {who}",
        status,
        "attained MSE at least the figure, on every image and share",
        "||X - X′|| ≥ ||r - r′|| / ||∇f||",
        f"{kept} of {len(checks)}" if checks else "-",
    )


def _says_more(rows: Sequence[Row]) -> Judgement:
    ratios = [max(r[k] for k in SOUND) / r["blind"] for r in rows]
    status = "not measured" if not ratios else "reproduced" if min(ratios) >= 1 else "not reproduced"
    return Judgement(
        "Theorem 1's sound version promises more than a blind guess gets",
        status,
        "certified MSE at least that of the mean image, on every image and share",
        "not compared",
        f"at most {max(ratios):.2g} of it" if ratios else "-",
    )


def _theorem2(rows: Sequence[Row]) -> list[Row]:
    """Return the convergence item's summary lines of defended runs that have bounds."""
    lines = Convergence().summary(of_item(rows, "convergence"))
    return [line for line in lines if line["setting"].endswith("ours") and "printed bound" in line]


def _second(lines: Sequence[Row]) -> Judgement:
    kept = [float(line["F - F*"]) <= float(line["printed bound"]) for line in lines]
    status = "not measured" if not kept else "reproduced" if all(kept) else "not reproduced"
    loose = [float(line["printed bound"]) / max(float(line["F - F*"]), 1e-12) for line in lines]
    return Judgement(
        "Theorem 2's figure lies above the gap on these runs (it is no bound in general)",
        status,
        "F(W_T) - F* at most the printed figure, in every defended run",
        "E F(W_T) - F* ≤ (2κ/(γ+T)) ((Q + C)/μ + ...)",
        f"{sum(kept)} of {len(kept)}; {min(loose):.2g} to {max(loose):.2g} times the gap" if kept else "-",
    )
