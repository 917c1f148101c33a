"""Every certificate on the paper's untrained networks: what is estimated, what is proved, what an inversion reaches."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import ClassVar

import torch

from gradveil.certificates.base import SCOPE, Certificate, Kind, blind_mse, largest_mse
from gradveil.certificates.certify import certify, readable_p
from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.layers.modules import find_layer, representation
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row, finite
from gradveil.paper.figures import PROMISED, REACHED, SOUND, Dot, dot_panels

NETWORKS = {"sigmoid": "lenet", "relu": "lenet:activation=relu,init=default"}
KINDS: dict[str, tuple[Kind, ...]] = {
    "2": ("local", "global", "box", "radius", "reach", "empirical"),
    "1": ("local", "global", "box", "reach"),
    "inf": ("local", "global", "box", "reach"),
}
PUBLIC = 2000  # images whose mean is the blind guess


@ITEMS.register("certificates")
@dataclass(frozen=True)
class Certificates(Item):
    """All kinds in all norms, 40 % of the representation zeroed; the largest and the blind MSE beside them."""

    title = "Theorem 1 and its sound relatives (untrained LeNet, 40 % zeroed)"
    notes: ClassVar[tuple[str, ...]] = (
        "local is the theorem as printed, a first-order estimate; global, box, radius and reach are proved.",
        SCOPE,
    )
    source = "bounds"

    share: float = 0.4
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    images: int = 2  # of each draw of the weights
    draws: int = 3  # of the weights: the figures differ more between networks than between images; quick: 1

    def units(self, context: Context) -> list[str]:
        """Return data set, network, norm and draw of the weights; quick: one draw, and the first data set only."""
        draws = range(self.draws if context.full else 1)
        datasets = self.datasets if context.full else self.datasets[:1]
        return [f"{d} {net} p={p} draw={i}" for d in datasets for net in NETWORKS for p in KINDS for i in draws]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Certify the images in every kind that the norm has."""
        dataset, net, norm, draw = unit.split()
        p, number = norm.removeprefix("p="), int(draw.removeprefix("draw="))
        source = load(dataset, context.data)
        model = build(
            NETWORKS[net], source.input_shape, source.num_classes, seed=context.seeds.number("weights", number)
        )
        order = torch.randperm(len(source.train), generator=context.seeds("images"))
        x = source.train.batch(order[: self.images]).inputs
        public = torch.randperm(len(source.test), generator=context.seeds("public"))[:PUBLIC]
        floors = {"blind": blind_mse(x, source.test.batch(public).inputs.mean(0)), "largest": largest_mse(x)}
        layer = find_layer(model)
        rng = context.seeds("defense")
        defense = build_defense(f"representation:share={self.share}")
        r = representation(model, layer, x)
        perturbed = defense.perturb(model, layer, x, r, rng).detach().flatten(1)
        rows = []
        for kind in KINDS[p]:
            rng = context.seeds("inversion")
            found = certify(model, layer, x, perturbed, readable_p(p), kind, rng=rng)
            figures = {"mse": found.to_mse(), **floors, **_details(found)}
            if kind == "empirical":  # what is proved of an answer that leaves this residual
                proved = certify(
                    model, layer, x, perturbed, readable_p(p), "residual", residual=found.details["residual"]
                )
                figures["proved"] = proved.to_mse()
            name = {"dataset": dataset, "network": net, "p": p, "draw": number, "kind": kind}
            rows += [
                name | {"image": i} | {key: finite(values[i]) for key, values in figures.items()} for i in range(len(x))
            ]
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per network and norm: every kind's MSE, mean (lowest to highest) over draws and images."""
        table = []
        for key in dict.fromkeys((r["dataset"], r["network"], r["p"]) for r in rows):
            mine = [r for r in rows if (r["dataset"], r["network"], r["p"]) == key]
            line: Row = {"network": f"{key[0]}, {key[1]}", "p": key[2], "cases": len({_case(r) for r in mine})}
            line["local (estimate)"] = _mean(mine, "local")
            line |= {kind: _mean(mine, kind) for kind in ("global", "box", "radius")}
            line["reach"] = _reach([r for r in mine if r["kind"] == "reach"])
            line["inversion of r′ (‖f(X′)−r′‖ / ‖r−r′‖)"] = _inversion(
                [r for r in mine if r["kind"] == "empirical"], mine
            )
            line["mean image"] = f"{sum(r['blind'] for r in mine) / len(mine):.3g}"
            line["largest possible"] = f"{sum(r['largest'] for r in mine) / len(mine):.3g}"
            table.append(line)
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the printed figure against what images can have, and the sound ones against what was reached."""
        local = [r for r in rows if r["kind"] == "local" and r["p"] == "2"]
        reached = [r for r in rows if r["kind"] == "empirical"]
        found = []
        if local:
            above = sum(_number(r["mse"]) > r["largest"] for r in local)
            status = "not reproduced" if above else "reproduced"
            text = f"above it on {above} of {len(local)} cases"
            rule = "the figure (p = 2) at most the largest MSE that any image in [0, 1] can have, in every case"
            found.append(Judgement("Theorem 1's figure is an MSE that images can have", status, rule, "a bound", text))
        if reached:
            held = sum(r["mse"] >= _number(r["proved"]) for r in reached)
            status = "reproduced" if held == len(reached) else "not reproduced"
            rule = "MSE of the inversion at least the sound bound for its residual, in every case"
            text = f"held on {held} of {len(reached)} cases"
            claim = "The sound bounds hold for what an inversion of r′ finds"
            found.append(Judgement(claim, status, rule, "not in the paper", text))
        return found

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw what every kind promises for p = 2, mean and range over draws and images, and what images can have."""
        panels: dict[str, list[Dot]] = {}
        lines = {}
        for dataset, network in dict.fromkeys((r["dataset"], r["network"]) for r in rows):
            mine = [r for r in rows if (r["dataset"], r["network"], r["p"]) == (dataset, network, "2")]
            for kind, look in LOOKS.items():
                values = [r["mse"] for r in mine if r["kind"] == kind and r["mse"] is not None]
                if values and max(values) > 0:
                    panels.setdefault(f"{dataset}, {network}", []).append(Dot.of(kind, values, look))
            if mine:
                means = {name: sum(r[key] for r in mine) / len(mine) for key, name in LINES.items()}
                lines[f"{dataset}, {network}"] = means
        dot_panels(path, panels, "MSE (p = 2)", log=True, lines=lines, columns=2)
        return True


LOOKS = {"local": PROMISED, "global": SOUND, "box": SOUND, "radius": SOUND, "reach": SOUND, "empirical": REACHED}
LINES = {"blind": "blind guess (mean image)", "largest": "largest that an image can have"}


def _details(found: Certificate) -> dict[str, torch.Tensor]:
    wanted = ("distance", "residual", "lipschitz", "norm", "unreachable", "least_residual")
    return {"bound": found.bound} | {k: v for k, v in found.details.items() if k in wanted}


def _number(value: float | None) -> float:
    return inf if value is None else value


def _case(row: Row) -> tuple[int, int]:
    return row["draw"], row["image"]


def _mean(rows: Sequence[Row], kind: str) -> str:
    values = [_number(r["mse"]) for r in rows if r["kind"] == kind]
    if not values:
        return ""
    spread = f" ({min(values):.2g} to {max(values):.2g})" if len(values) > 1 else ""
    return f"{sum(values) / len(values):.2g}{spread}"


def _reach(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    none = sum(bool(r["unreachable"]) for r in rows)
    if none == len(rows):
        return "no image has r′"
    rest = [_number(r["mse"]) for r in rows if not r["unreachable"]]
    return f"{sum(rest) / len(rest):.3g}" + (f"; no image has r′ for {none}" if none else "")


def _inversion(rows: Sequence[Row], others: Sequence[Row]) -> str:
    if not rows:
        return ""
    sizes = {_case(r): r["distance"] for r in others if r["kind"] == "global"}
    mse = sum(r["mse"] for r in rows) / len(rows)
    left = sum(r["residual"] / sizes[_case(r)] for r in rows) / len(rows)
    return f"{mse:.3g} ({left:.2f})"
