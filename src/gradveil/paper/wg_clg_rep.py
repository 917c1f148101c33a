"""The paper's figure on parts of the gradient: whole (WG), convolutions only (CLG), inferred representation (Rep)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradveil.attacks.base import build as build_attack
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.metrics import interval, measure, rate
from gradveil.models import build
from gradveil.paper.base import BLIND, ITEMS, SUCCESS, Context, Item, Judgement, Row, published
from gradveil.paper.figures import figure
from gradveil.paper.points import GALLERY, Shared, floor_rows
from gradveil.types import Batch, Observation

FEW, CONTROL = 0.05, 0.1  # shares of images: recovered by chance at most; recovered by a working attack at least
NETWORKS = {
    "probe": "probe",
    "probe, sigmoid": "probe:activation=sigmoid,init=uniform,stride=2,padding=2",
    "lenet": "lenet",
    "convnet": "convnet",
}
MARKS = {"WG": ("o", "#0072B2"), "CLG": ("s", "#D55E00"), "Rep": ("^", "#009E73")}  # part -> mark and colour
PARTS = tuple(MARKS)


@ITEMS.register("figure-wg-clg-rep")
@dataclass(frozen=True)
class WgClgRep(Item):
    """DLG on the whole gradient, on the convolutions' alone, and on the representation read off the last layer.

    The paper shows one network of one convolution (its activation, stride and padding are not given: both readings
    are run) and concludes that the representation is the essential cause. The same on the paper's own LeNet (and, at
    full scale, its ConvNet) is the control for that conclusion.
    """

    title = "Figure: DLG on the whole gradient, the convolutions' gradients, and the inferred representation"
    source = "wg_clg_rep"
    notes = (
        "The paper gives neither activation, stride nor padding of its one-convolution network: ReLU, stride 1, no "
        "padding and default initialisation (probe), and sigmoid, uniform(±0.5), stride 2, padding 2 are both run.",
        "LeNet and ConvNet are ours: a control for the conclusion that the representation is the essential cause. DLG "
        "fails on the ConvNet (ReLU) whatever it sees; GS does not, and loses nothing where the last layer's weights "
        "are left out: the server *drop* in [tradeoff](#tradeoff).",
        "Two starts, the better one by the attack's own objective; found images are clamped to [0, 1] before they are "
        "measured.",
    )

    steps: int = 100  # outer steps of 20 iterations; quick: a quarter
    restarts: int = 2
    dataset: str = "cifar10"
    images: int = 32  # quick: half

    def units(self, context: Context) -> list[str]:
        """Return network/part, and the blind guesses once."""
        networks = [n for n in NETWORKS if context.full or n != "convnet"]
        return ["blind", *(f"{network}/{part}" for network in networks for part in PARTS)]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images of one network by one part of the update."""
        network, _, part = unit.partition("/")
        dataset = load(self.dataset, context.data)
        spec = NETWORKS.get(network, "probe")
        model = build(spec, dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
        scene = self._scene(model, dataset, context)
        if unit == "blind":
            return [row | {"network": BLIND, "part": row["server"]} for row in floor_rows(scene)]
        views = [_VIEWS[part](s) for s in scene.observe("none", context.device)]
        name = "rep" if part == "Rep" else "dlg"
        steps = self.steps if context.full else max(self.steps // 4, 1)
        attack = build_attack(f"{name}:steps={steps},restarts={self.restarts}")
        rngs = [scene.seeds("attack", network, part, i) for i in range(len(views))]
        rows = []
        for i, found in enumerate(attack.reconstruct_many(views, rngs)):
            truth = Batch(scene.truth.inputs[i : i + 1], scene.truth.labels[i : i + 1])
            values, _ = measure(found.inputs, found.labels, truth, scene.public.inputs[:GALLERY])
            row = {"network": network, "part": part, "image": i, "objective": found.objective}
            row |= {key: float(v[0]) for key, v in values.items()}
            rows.append(row | {"converged": found.converged, "known": _count(views[i])})
        return rows

    def _scene(self, model: nn.Module, dataset: Dataset, context: Context) -> Shared:
        """Return the images to attack and the public ones; no prior, since neither attack has one."""
        count = self.images if context.full else self.images // 2
        truth = dataset.train.batch(torch.randperm(len(dataset.train), generator=context.seeds("images"))[:count])
        public = dataset.test.batch(torch.randperm(len(dataset.test), generator=context.seeds("public"))[:2000])
        return Shared(model, truth, public, dataset.num_classes, context.seeds)

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return MSE, PSNR and success per network and part, the blind guesses last."""
        table = []
        for network, part in dict.fromkeys((r["network"], r["part"]) for r in rows):
            mine = _of(rows, network, part)
            mse, psnr = interval([r["mse"] for r in mine]), interval([r["psnr"] for r in mine])
            hit = rate([float(r["mse"] < SUCCESS) for r in mine])
            table.append(
                {
                    "network": network,
                    "part": part,
                    "images": len(mine),
                    "numbers seen": mine[0].get("known", "-"),
                    "mse": f"{mse.mean:.4f} [{mse.low:.4f}, {mse.high:.4f}]",
                    "psnr": f"{psnr.mean:.1f}",
                    "success": f"{hit.mean:.0%} [{hit.low:.0%}, {hit.high:.0%}]",
                }
            )
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge both halves of the claim on every network: convolutions fail, and the representation is enough."""
        blind = [_average(_of(rows, BLIND, r["part"])) for r in rows if r["network"] == BLIND]
        found = []
        for network in dict.fromkeys(r["network"] for r in rows if r["part"] in PARTS):
            mine = {part: _of(rows, network, part) for part in PARTS}
            if all(mine.values()):
                found += [_convolutions(network, mine), _representation(network, mine, min(blind, default=None))]
        return found

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the MSE of every image, by network and part, over the blind guesses."""
        with figure(path, 8.5, 4.0) as empty:
            _strips(empty.subplots(), rows)
        return True


_VIEWS: dict[str, Callable[[Observation], Observation]] = {
    "WG": lambda seen: seen,
    "CLG": lambda seen: seen.only("conv*"),
    "Rep": lambda seen: seen.only("fc.*"),
}


def _count(seen: Observation) -> int:
    return sum(g.numel() for g in seen.update.gradient.values())


def _convolutions(network: str, rows: dict[str, list[Row]]) -> Judgement:
    """Judge whether the convolutions' gradients alone give nothing, where the whole gradient gives something."""
    whole, alone = _recovered(rows["WG"]), _recovered(rows["CLG"])
    return Judgement(
        f"{network}: convolution gradients alone do not reconstruct",
        _status(alone <= FEW, whole, alone),
        f"CLG recovers at most {FEW:.0%} of the images (clamped MSE < {SUCCESS}); void where neither WG nor CLG "
        f"recovers {CONTROL:.0%}",
        published()["wg_clg_rep"]["claim"],
        f"CLG {alone:.0%} (mean MSE {_average(rows['CLG']):.4f}), WG {whole:.0%} ({_average(rows['WG']):.4f})",
    )


def _representation(network: str, rows: dict[str, list[Row]], blind: float | None) -> Judgement:
    """Judge whether the inferred representation does as well as the whole gradient, and better than a guess."""
    rep, whole, mean = _recovered(rows["Rep"]), _recovered(rows["WG"]), _average(rows["Rep"])
    holds = rep >= whole and (blind is None or mean < blind)
    floor = "not run" if blind is None else f"{blind:.4f}"
    return Judgement(
        f"{network}: the representation alone reconstructs as well as the whole gradient",
        _status(holds, whole, rep),
        f"Rep recovers at least the share of images that WG does (clamped MSE < {SUCCESS}), and its mean clamped MSE "
        f"is below that of the best blind guess; void where neither recovers {CONTROL:.0%}",
        published()["wg_clg_rep"]["claim"],
        f"Rep {rep:.0%} (mean MSE {mean:.4f}), WG {whole:.0%} ({_average(rows['WG']):.4f}), best blind guess {floor}",
    )


def _status(holds: bool, *recovered: float) -> str:
    """Return the verdict, where at least one of the attacks that it compares works."""
    if max(recovered) < CONTROL:
        return "not measured"
    return "reproduced" if holds else "not reproduced"


def _recovered(rows: Sequence[Row]) -> float:
    return float(sum(r["mse"] < SUCCESS for r in rows) / len(rows))


def _average(rows: Sequence[Row]) -> float:
    return float(sum(r["mse"] for r in rows) / len(rows))


def _of(rows: Sequence[Row], network: str, part: str) -> list[Row]:
    return [r for r in rows if (r["network"], r["part"]) == (network, part)]


def _strips(axis: Any, rows: Sequence[Row]) -> None:
    networks = list(dict.fromkeys(r["network"] for r in rows if r["part"] in PARTS))
    for g, network in enumerate(networks):
        for p, (part, (mark, colour)) in enumerate(MARKS.items()):
            values = [max(r["mse"], 1e-9) for r in _of(rows, network, part)]
            place = g + (p - 1) * 0.25
            label = part if g == 0 else None
            axis.scatter([place] * len(values), values, s=12, marker=mark, color=colour, alpha=0.6, label=label)
            if values:
                axis.hlines(sum(values) / len(values), place - 0.09, place + 0.09, color=colour)
    guesses = list(dict.fromkeys(r["part"] for r in rows if r["network"] == BLIND))
    for n, guess in enumerate(guesses):
        label = f"blind guess: {', '.join(guesses)}" if n == 0 else None
        level = _average(_of(rows, BLIND, guess))
        axis.axhline(level, color="grey", linestyle=":", linewidth=1, label=label)
    axis.set_yscale("log")
    axis.set_xticks(range(len(networks)), networks)
    axis.set_ylabel("clamped MSE, one mark an image, bar: mean")
    axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
