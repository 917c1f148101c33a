"""The paper's figure on parts of the gradient: whole (WG), convolutions only (CLG), inferred representation (Rep)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradveil.attacks import DLG
from gradveil.countermeasures import Countermeasure
from gradveil.metrics import interval, rate
from gradveil.ranges import Count
from gradveil.threats.rows import group
from gradveil.threats.trial import Trial, measured, numbers, solved
from gradveil.types import Observation
from gradveil_studies.paper.base import BLIND, ITEMS, SUCCESS, Context, Item, Judgement, Row, judge, published
from gradveil_studies.paper.figures import figure
from gradveil_studies.paper.panels import shared
from gradveil_studies.paper.rep import Rep
from gradveil_studies.paper.rows import Measured

FEW, CONTROL = 0.05, 0.1  # shares of images: recovered by chance at most; recovered by a working attack at least
NETWORKS = {
    "probe": "probe",
    "probe, sigmoid": "probe:activation=sigmoid,init=uniform,stride=2,padding=2",
    "lenet": "lenet",
    "convnet": "convnet",
}
MARKS = {"WG": ("o", "#0072B2"), "CLG": ("s", "#D55E00"), "Rep": ("^", "#009E73")}  # part -> mark and colour
PARTS = tuple(MARKS)


@dataclass(frozen=True)
class PartMeasured(Measured):
    """One image, attacked by one part of the update."""

    network: str = ""
    part: str = ""
    known: int | str = "-"  # how many numbers the server saw


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
        "are left out: the server *drop* in [tradeoff](items.md#tradeoff).",
        "Two starts, the better one by the attack's own objective; found images are clamped to [0, 1] before they are "
        "measured.",
    )

    steps: Count = 100  # outer steps of 20 iterations; quick: a quarter
    restarts: Count = 2
    dataset: str = "cifar10"
    images: Count = 32  # quick: half

    def work(self, context: Context) -> dict[str, tuple[str, str]]:
        networks = [n for n in NETWORKS if context.full or n != "convnet"]
        attacked = {f"{network}/{part}": (network, part) for network in networks for part in PARTS}
        return {"blind": (BLIND, ""), **attacked}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images of one network by one part of the update."""
        network, part = self.work(context)[unit]
        count = self.images if context.full else self.images // 2
        scene = shared(self.dataset, NETWORKS.get(network, "probe"), count, context, with_prior=False)  # none has one
        if network == BLIND:
            return [row | {"network": BLIND, "part": row["server"]} for row in scene.floors()]
        steps = self.steps if context.full else max(self.steps // 4, 1)
        attack = (Rep if part == "Rep" else DLG)(steps=steps, restarts=self.restarts)
        server = Countermeasure(part, "Looks at a part of the update.", _VIEWS[part])
        rngs = [scene.seeds("attack", network, part, i) for i in range(count)]
        trials = [Trial(s, server, attack, rng) for s, rng in zip(scene.observe("none"), rngs, strict=True)]
        rows = []
        for i, (trial, found) in enumerate(zip(trials, solved(trials), strict=True)):
            row = {"network": network, "part": part, "image": i, "objective": found.objective}
            row |= numbers(measured(found, scene.truth[i : i + 1], scene.public.gallery)[0])
            rows.append(row | {"converged": found.converged, "known": _count(trial.view)})
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return MSE, PSNR and success per network and part, the blind guesses last."""
        return [
            {
                "network": network,
                "part": part,
                "images": len(mine),
                "numbers seen": mine[0].known,
                "mse": f"{interval([r.mse for r in mine]):.4f}",
                "psnr": f"{fmean(r.psnr for r in mine):.1f}",
                "success": f"{rate([r.recovered for r in mine]):.0%}",
            }
            for (network, part), mine in group(PartMeasured.read(rows), "network", "part").items()
        ]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge both halves of the claim on every network: convolutions fail, and the representation is enough."""
        parts = group(PartMeasured.read(rows), "network", "part")
        blind = min((_average(mine) for (network, _), mine in parts.items() if network == BLIND), default=None)
        verdicts = []
        for network in dict.fromkeys(network for network, part in parts if part in PARTS):
            if all((network, part) in parts for part in PARTS):
                whole, convolutions, representation = (parts[network, part] for part in PARTS)
                verdicts.append(_convolutions(network, whole, convolutions))
                verdicts.append(_representation(network, whole, representation, blind))
        return verdicts

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the MSE of every image, by network and part, over the blind guesses."""
        with figure(path, 8.5, 4.0) as empty:
            _strips(empty.subplots(), group(PartMeasured.read(rows), "network", "part"))
        return True


_VIEWS: dict[str, Callable[[Observation], Observation]] = {
    "WG": lambda seen: seen,
    "CLG": lambda seen: seen.only("conv*"),
    "Rep": lambda seen: seen.only("fc.*"),
}


def _count(seen: Observation) -> int:
    return sum(g.numel() for g in seen.update.gradient.values())


Images = Sequence[PartMeasured]


def _convolutions(network: str, whole: Images, alone: Images) -> Judgement:
    """Judge whether the convolutions' gradients alone give nothing, where the whole gradient gives something."""
    return judge(
        f"{network}: convolution gradients alone do not reconstruct",
        _recovered(alone) <= FEW,
        f"CLG recovers at most {FEW:.0%} of the images (clamped MSE < {SUCCESS}); void where neither WG nor CLG "
        f"recovers {CONTROL:.0%}",
        published()["wg_clg_rep"]["claim"],
        f"CLG {_recovered(alone):.0%} (mean MSE {_average(alone):.4f}), {_whole(whole)}",
        control=_works(whole, alone),
    )


def _representation(network: str, whole: Images, rep: Images, blind: float | None) -> Judgement:
    """Judge whether the inferred representation does as well as the whole gradient, and better than a guess."""
    floor = "not run" if blind is None else f"{blind:.4f}"
    return judge(
        f"{network}: the representation alone reconstructs as well as the whole gradient",
        _recovered(rep) >= _recovered(whole) and (blind is None or _average(rep) < blind),
        f"Rep recovers at least the share of images that WG does (clamped MSE < {SUCCESS}), and its mean clamped MSE "
        f"is below that of the best blind guess; void where neither recovers {CONTROL:.0%}",
        published()["wg_clg_rep"]["claim"],
        f"Rep {_recovered(rep):.0%} (mean MSE {_average(rep):.4f}), {_whole(whole)}, best blind guess {floor}",
        control=_works(whole, rep),
    )


def _whole(whole: Images) -> str:
    return f"WG {_recovered(whole):.0%} ({_average(whole):.4f})"


def _works(*compared: Images) -> bool:
    """Return whether at least one of the attacks that are compared works."""
    return max(map(_recovered, compared)) >= CONTROL


def _recovered(rows: Images) -> float:
    return fmean(r.recovered for r in rows)


def _average(rows: Images) -> float:
    return fmean(r.mse for r in rows)


def _strips(axis: Any, parts: Mapping[tuple[str, str], Images]) -> None:
    networks = list(dict.fromkeys(network for network, part in parts if part in PARTS))
    for g, network in enumerate(networks):
        for p, (part, (mark, colour)) in enumerate(MARKS.items()):
            values = [max(r.mse, 1e-9) for r in parts.get((network, part), ())]
            place = g + (p - 1) * 0.25
            label = part if g == 0 else None
            axis.scatter([place] * len(values), values, s=12, marker=mark, color=colour, alpha=0.6, label=label)
            if values:
                axis.hlines(fmean(values), place - 0.09, place + 0.09, color=colour)
    guesses = [part for network, part in parts if network == BLIND]
    for n, guess in enumerate(guesses):
        label = f"blind guess: {', '.join(guesses)}" if n == 0 else None
        axis.axhline(_average(parts[BLIND, guess]), color="grey", linestyle=":", linewidth=1, label=label)
    axis.set_yscale("log")
    axis.set_xticks(range(len(networks)), networks)
    axis.set_ylabel("clamped MSE, one mark an image, bar: mean")
    axis.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
