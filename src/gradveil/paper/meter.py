"""Does the leak meter say what the strongest attack reaches? Not in the paper: a check of our own figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr

from gradveil.attacks.base import build as build_attack
from gradveil.certificates.meter import leak_meter
from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.defenses.step import step_gradient
from gradveil.errors import MissingExtraError
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Row, Verdict
from gradveil.priors import GaussianPrior
from gradveil.types import Observation, Update

View = Callable[[Observation], Observation]
PUBLIC, RANK = 2000, 256  # images and principal directions of the prior

# setting -> (defence, what the server looks at); noise levels are relative to the RMS of the gradient's entries
SETTINGS: dict[str, tuple[str, View | None]] = {  # None: the first countermeasure that the defence itself names
    "none": ("none", lambda seen: seen),
    "ours 40 %, mask read": ("representation:share=0.4", lambda seen: seen.masked("fc.weight")),
    "ours 80 %, mask read": ("representation:share=0.8", lambda seen: seen.masked("fc.weight")),
    "ours 40 %, tensor dropped": ("representation:share=0.4", lambda seen: seen.without("fc.weight")),
    "ours 80 %, tensor dropped": ("representation:share=0.8", lambda seen: seen.without("fc.weight")),
    "fc.weight alone": ("none", lambda seen: seen.only("fc.weight")),
    "conv1.weight alone": ("none", lambda seen: seen.only("conv1.weight")),
    "biases alone": ("none", lambda seen: seen.only("*.bias")),
    "noise 0.01": ("gaussian:scale=0.01,relative=true", None),
    "noise 0.1": ("gaussian:scale=0.1,relative=true", None),
    "noise 0.3": ("gaussian:scale=0.3,relative=true", None),
    "noise 1": ("gaussian:scale=1,relative=true", None),
    "noise 3": ("gaussian:scale=3,relative=true", None),
    "pruning 90 %, mask read": ("pruning:share=0.9", lambda seen: seen.masked("*")),
    "pruning 97 %, mask read": ("pruning:share=0.97", lambda seen: seen.masked("*")),
    "pruning 99 %, mask read": ("pruning:share=0.99", lambda seen: seen.masked("*")),
}


@ITEMS.register("meter")
@dataclass(frozen=True)
class MeterCheck(Item):
    """The meter beside what Gauss-Newton with the same prior reaches, setting by setting."""

    title = "The leak meter against the strongest attack (LeNet, MNIST, batch 1)"

    model: str = "lenet"
    dataset: str = "mnist"
    attack: str = "newton"
    floor: float = 1e-5  # noise that stands for rounding, relative; the attack's own last one

    def units(self, context: Context) -> list[str]:
        """Return image and setting of every problem."""
        return [f"{i} {name}" for i in range(8 if context.full else 2) for name in SETTINGS]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Meter and attack one update."""
        number, _, name = unit.partition(" ")
        source = load(self.dataset, context.data)
        model = build(self.model, source.input_shape, source.num_classes, seed=context.seeds.number("weights"))
        chosen = torch.randperm(len(source.train), generator=context.seeds("images"))[int(number)]
        truth = source.train.batch(chosen.reshape(1))
        public = torch.randperm(len(source.test), generator=context.seeds("public"))[:PUBLIC]
        prior = GaussianPrior.fit(source.test.batch(public).inputs, rank=RANK)
        spec, view = SETTINGS[name]
        defense, rng = build_defense(spec), context.seeds("defense", int(number), name)
        update = defense.on_update(Update(step_gradient(model, truth, defense, rng)), rng)
        seen = Observation(model, update, source.input_shape, source.num_classes, truth.labels, prior=prior)
        seen = view(seen) if view is not None else defense.adaptive(model)[0].view(seen)
        leak = leak_meter(seen, truth, floor=self.floor)
        found = build_attack(self.attack).reconstruct(seen, context.seeds("attack", int(number), name))
        mse = float((found.inputs - truth.inputs).square().mean())
        blind = float((prior.mean - truth.inputs.reshape(-1)).square().mean())
        return [
            {"setting": name, "image": int(number), "meter": leak.mse, "mse": mse, "rank": leak.rank, "blind": blind}
            | {"prior": leak.prior_mse, "objective": found.objective, "converged": found.converged}
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

    def verdicts(self, rows: Sequence[Row]) -> list[Verdict]:
        """Judge whether the meter ranks the settings as the attack does."""
        means = _means(rows)
        if len(means) < 3:
            return []
        rho, r = correlations(rows)
        status = "reproduced" if rho >= 0.9 else "not reproduced"
        text = f"Spearman {rho:.2f}, correlation of logarithms {r:.2f}, {len(means)} settings"
        rule = "Spearman's rank correlation of the settings' geometric means at least 0.9"
        return [
            Verdict("The leak meter predicts what the strongest attack reaches", status, rule, "not in the paper", text)
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw attack MSE against the meter, one mark a problem, one name a setting."""
        try:
            import matplotlib as mpl
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError("Drawing figures", "report") from error
        with mpl.rc_context({"svg.hashsalt": "gradveil", "font.size": 9}):
            figure = Figure(figsize=(7.5, 5.5), layout="constrained")
            _scatter(figure.subplots(), rows)
            for ending, extra in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 150})):
                figure.savefig(path.with_suffix(ending), **extra)
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


MARKS = {"none": "o", "ours": "s", "fc.weight": "^", "conv1.weight": "^", "biases": "^", "noise": "D", "pruning": "v"}
COLOURS = {"o": "#000000", "s": "#D55E00", "^": "#009E73", "D": "#0072B2", "v": "#CC79A7"}


def _scatter(axis: Any, rows: Sequence[Row]) -> None:
    for name, mine, meter, mse in _means(rows):
        mark = MARKS[name.split()[0]]
        axis.scatter(
            [r["meter"] for r in mine], [r["mse"] for r in mine], marker=mark, color=COLOURS[mark], s=14, alpha=0.6
        )
        axis.annotate(name, (meter, mse), xytext=(5, -3), textcoords="offset points", fontsize=7)
    ends = [min(r["meter"] for r in rows) / 3, max(r["prior"] for r in rows) * 3]
    axis.plot(ends, ends, color="grey", linewidth=0.8, linestyle="--")
    blind = sum(r["blind"] for r in rows) / len(rows)
    axis.axhline(blind, color="grey", linewidth=0.8, linestyle=":")
    axis.annotate("mean image", (ends[0], blind), xytext=(2, 3), textcoords="offset points", fontsize=7, color="grey")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("leak meter: Bayesian Cramér-Rao MSE")
    axis.set_ylabel("MSE that the attack reached")
