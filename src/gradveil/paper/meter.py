"""Does the leak meter say what the strongest attack reaches? Not in the paper: a check of our own figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from gradveil.attacks.base import build as build_attack
from gradveil.certificates.meter import leak_meter
from gradveil.data import load
from gradveil.data.base import Split
from gradveil.defenses.base import build as build_defense
from gradveil.defenses.guard.step import step_gradient
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row
from gradveil.paper.figures import figure
from gradveil.types import Batch, GaussianPrior, Observation, Update

View = Callable[[Observation], Observation]
PUBLIC, RANK = 2000, 256  # images and principal directions of the prior
NOISY = 1e-4  # below it the meter is set by its floor and the attack by its tolerance
EVERY_LAYER = "random_mask:share=0.4,layer=conv1/conv2/conv3/conv4/fc"


def _as_it_is(seen: Observation) -> Observation:
    return seen


def _mask_read(seen: Observation) -> Observation:
    return seen.masked("fc.weight")


def _dropped(seen: Observation) -> Observation:
    return seen.without("fc.weight")


# setting -> (defence, what the server looks at); noise levels are relative to the RMS of the gradient's entries
SETTINGS: dict[str, tuple[str, View | None]] = {  # None: the first countermeasure that the defence itself names
    "none": ("none", _as_it_is),
    "ours 40 %, mask read": ("representation:share=0.4", _mask_read),
    "ours 80 %, mask read": ("representation:share=0.8", _mask_read),
    "ours 40 %, tensor dropped": ("representation:share=0.4", _dropped),
    "ours 80 %, tensor dropped": ("representation:share=0.8", _dropped),
    "fc.weight alone": ("none", lambda seen: seen.only("fc.weight")),
    "conv1.weight alone": ("none", lambda seen: seen.only("conv1.weight")),
    "biases alone": ("none", lambda seen: seen.only("*.bias")),
    "every layer masked 40 %": (EVERY_LAYER, lambda seen: _mask_read(seen.only("*.bias", "fc.weight"))),
    "noise 0.01": ("gaussian:scale=0.01,relative=true", None),
    "noise 0.1": ("gaussian:scale=0.1,relative=true", None),
    "noise 0.3": ("gaussian:scale=0.3,relative=true", None),
    "noise 1": ("gaussian:scale=1,relative=true", None),
    "noise 3": ("gaussian:scale=3,relative=true", None),
    "pruning 90 %, mask read": ("pruning:share=0.9", lambda seen: seen.masked("*")),
    "pruning 97 %, mask read": ("pruning:share=0.97", lambda seen: seen.masked("*")),
    "pruning 99 %, mask read": ("pruning:share=0.99", lambda seen: seen.masked("*")),
}
# The server takes what arrives for an undefended gradient: an attack that fails by its own mistake, not the strongest
NAIVE: dict[str, tuple[str, View | None]] = {
    "ours 40 %, naive-looking": ("representation:share=0.4", _as_it_is),
    "ours 80 %, naive-looking": ("representation:share=0.8", _as_it_is),
}

FULL_ONLY = {  # left out of a quick run: their kind stays in it
    "ours 80 %, mask read", "ours 80 %, tensor dropped", "ours 80 %, naive-looking", "noise 0.3",
    "every layer masked 40 %", "pruning 97 %, mask read", "pruning 99 %, mask read",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """What every problem shares: the weights, the images, what the server knows of images in general."""

    model: nn.Module
    images: Split
    order: Tensor  # of the images
    prior: GaussianPrior
    shape: tuple[int, ...]
    num_classes: int
    device: torch.device

    def truth(self, number: int) -> Batch:
        """Return one image with its label."""
        one = self.images.batch(self.order[number].reshape(1))
        return Batch(one.inputs.to(self.device), one.labels.to(self.device))


@lru_cache(maxsize=1)
def _place(model: str, dataset: str, context: Context) -> Place:
    source, device = load(dataset, context.data), context.device
    net = build(model, source.input_shape, source.num_classes, seed=context.seeds.number("weights")).to(device)
    order = torch.randperm(len(source.train), generator=context.seeds("images"))
    public = torch.randperm(len(source.test), generator=context.seeds("public"))[:PUBLIC]
    prior = GaussianPrior.fit(source.test.batch(public).inputs.to(device), rank=RANK)
    return Place(net, source.train, order, prior, source.input_shape, source.num_classes, device)


def _finite(value: float | None) -> float | None:
    return value if value is not None and isfinite(value) else None


@ITEMS.register("meter")
@dataclass(frozen=True)
class MeterCheck(Item):
    """The meter beside what Gauss-Newton with the same prior reaches, setting by setting."""

    title = "The leak meter against the strongest attack (LeNet, MNIST, batch 1)"
    notes: ClassVar[tuple[str, ...]] = (
        "Not in the paper: a check of our own figure, the leak meter (docs/theory/certificates.md).",
        "Labels are known to the server. Noise is relative to the RMS of the whole gradient, and its level is known.",
        "Masks on every layer: the server uses the biases and the entries of fc.weight that show to be sent.",
        "A naive server takes the defended tensor for an undefended one: not the strongest attack, so not correlated.",
    )

    model: str = "lenet"
    dataset: str = "mnist"
    attack: str = "newton"
    floor: float = 1e-5  # noise that stands for rounding, relative; the attack's own last one

    def units(self, context: Context) -> list[str]:
        """Return image and setting of every problem."""
        if not context.full:
            return [f"0 {name}" for name in SETTINGS | NAIVE if name not in FULL_ONLY]
        return [f"{i} {name}" for i in range(8) for name in SETTINGS | NAIVE]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Meter and attack one update."""
        number, _, name = unit.partition(" ")
        place = _place(self.model, self.dataset, context)
        model, prior, shape, classes = place.model, place.prior, place.shape, place.num_classes
        truth = place.truth(int(number))
        spec, view = (SETTINGS | NAIVE)[name]
        defense, rng = build_defense(spec), context.seeds("defense", int(number), name)
        update = defense.on_update(Update(step_gradient(model, truth, defense, rng)), rng)
        seen = Observation(model, update, shape, classes, truth.labels, prior=prior)
        seen = view(seen) if view is not None else defense.adaptive(model)[0].view(seen)
        leak = leak_meter(seen, truth, floor=self.floor)
        found = build_attack(self.attack).reconstruct(seen, context.seeds("attack", int(number), name))
        mse = float((found.inputs - truth.inputs).square().mean())
        blind = float((prior.mean - truth.inputs.reshape(-1)).square().mean())
        return [
            {"setting": name, "naive": name in NAIVE, "image": int(number), "meter": leak.mse, "mse": mse}
            | {"rank": leak.rank, "influence": _finite(leak.influence), "prior": leak.prior_mse, "blind": blind}
            | {"objective": found.objective, "converged": found.converged}
        ]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line per setting: geometric means over images."""
        lines = [
            {"setting": name, "images": len(mine), "meter": f"{meter:.2g}", "attack MSE": f"{mse:.2g}",
             "attack / meter": f"{mse / meter:.2g}", "rank": min(r["rank"] for r in mine)}
            for name, mine, meter, mse in _means(rows)
        ]  # fmt: skip
        blind = sum(r["blind"] for r in rows) / max(len(rows), 1)
        return [
            *lines,
            {"setting": "(mean image)", "images": len({r["image"] for r in rows}), "attack MSE": f"{blind:.2g}"},
        ]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge whether the meter ranks the settings as the attack does, naive servers aside."""
        strongest = [r for r in rows if not r["naive"]]
        means = _means(strongest)
        if len(means) < 3:
            return []
        rho, r = correlations(strongest)
        status = "reproduced" if rho >= 0.9 else "not reproduced"
        text = f"Spearman {rho:.2f}, correlation of logarithms {r:.2f}, {len(means)} settings"
        noisy = [name for name, _, meter, _ in means if meter > NOISY]
        if len(noisy) > 2:
            inside = correlations([r for r in strongest if r["setting"] in noisy])[0]
            text += f"; Spearman {inside:.2f} over the {len(noisy)} with a meter above {NOISY:g}"
        if len(strongest) < len(rows):
            text += f" ({correlations(rows)[0]:.2f} with the naive servers among them)"
        rule = "Spearman's rank correlation of the settings' geometric means at least 0.9, naive servers left out"
        return [
            Judgement(
                "The leak meter predicts what the strongest attack reaches", status, rule, "not in the paper", text
            )
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw attack MSE against the meter: all of it, and the part where noise decides, with names."""
        with figure(path, 12, 5) as empty:
            whole, part = empty.subplots(1, 2)
            _scatter(whole, rows)
            whole.set_title("all settings")
            whole.legend(frameon=False, fontsize=7, loc="center")
            noisy = [r for name, mine, meter, _ in _means(rows) if meter > NOISY for r in mine]
            if noisy:
                _scatter(part, noisy)
                _names(part, noisy)
            part.set_title(f"settings with a meter above {NOISY:g}")
        return True


def _means(rows: Sequence[Row]) -> list[tuple[str, list[Row], float, float]]:
    """Return setting, its rows, and the geometric means of meter and attained MSE."""
    found = []
    for name in dict.fromkeys(r["setting"] for r in rows):
        mine = [r for r in rows if r["setting"] == name]
        logs = torch.tensor([[r["meter"], max(r["mse"], 1e-15)] for r in mine], dtype=torch.float64).log().mean(0).exp()
        found.append((name, mine, float(logs[0]), float(logs[1])))
    return found


def correlations(rows: Sequence[Row]) -> tuple[float, float]:
    """Return Spearman's rank correlation of the settings' means, and Pearson's of their logarithms."""
    pairs = torch.tensor([[meter, mse] for _, _, meter, mse in _means(rows)], dtype=torch.float64)
    rho: Any = spearmanr(pairs[:, 0].numpy(), pairs[:, 1].numpy())
    r: Any = pearsonr(pairs[:, 0].log().numpy(), pairs[:, 1].log().numpy())
    return float(rho.statistic), float(r.statistic)


KINDS = {  # by the first word of a setting: mark, colour, name in the legend
    "none": ("o", "#000000", "no defence"),
    "ours": ("s", "#D55E00", "ours, server knows"),
    "fc.weight": ("^", "#009E73", "part of the update seen"),
    "conv1.weight": ("^", "#009E73", "part of the update seen"),
    "biases": ("^", "#009E73", "part of the update seen"),
    "every": ("P", "#56B4E9", "every layer masked"),
    "noise": ("D", "#0072B2", "Gaussian noise"),
    "pruning": ("v", "#CC79A7", "pruning"),
}


def _scatter(axis: Any, rows: Sequence[Row]) -> None:
    named: set[str] = set()
    for name, mine, _, _ in _means(rows):
        mark, colour, label = KINDS[name.split()[0]]
        if mine[0]["naive"]:
            label = "ours, naive server"
        look = {"marker": mark, "edgecolors": colour, "facecolors": "none" if mine[0]["naive"] else colour}
        label, named = ("_" if label in named else label), named | {label}
        axis.scatter([r["meter"] for r in mine], [r["mse"] for r in mine], s=14, alpha=0.6, label=label, **look)
    ends = [min(r["meter"] for r in rows) / 3, max(r["prior"] for r in rows) * 3]
    axis.plot(ends, ends, color="grey", linewidth=0.8, linestyle="--")
    blind = sum(r["blind"] for r in rows) / len(rows)
    axis.axhline(blind, color="grey", linewidth=0.8, linestyle=":")
    axis.annotate("mean image", (ends[0], blind), xytext=(2, 3), textcoords="offset points", fontsize=7, color="grey")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("leak meter: Bayesian Cramér-Rao MSE")
    axis.set_ylabel("MSE that the attack reached")


def _names(axis: Any, rows: Sequence[Row]) -> None:
    """Write each setting's name in one of two columns, in the order of the marks, with a line to its mean."""
    ranked = sorted(_means(rows), key=lambda m: m[2])
    half = (len(ranked) + 1) // 2
    for i, (name, _, meter, mse) in enumerate(ranked):
        left = i < half
        place = (0.02, 0.55 + 0.28 * i / half) if left else (0.72, 0.05 + 0.35 * (i - half) / half)
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "grey"}
        axis.annotate(name, (meter, mse), xytext=place, textcoords="axes fraction", fontsize=7, arrowprops=line)
