"""Does the leak meter say what the strongest attack reaches? Not in the paper: a check of our own figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, ClassVar

from scipy.stats import pearsonr, spearmanr

from gradveil.countermeasures import Countermeasure
from gradveil.protection.defense import build as build_defense
from gradveil.ranges import Count, Positive
from gradveil.threats.meter import leak_meter
from gradveil.threats.rows import group
from gradveil.threats.trial import Trial, solved
from gradveil.types import Observation
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, judge
from gradveil_studies.paper.figures import figure
from gradveil_studies.paper.panels import shared
from gradveil_studies.paper.rows import Record

View = Callable[[Observation], Observation]
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
OBLIVIOUS: dict[str, tuple[str, View | None]] = {
    "ours 40 %, oblivious-looking": ("representation:share=0.4", _as_it_is),
    "ours 80 %, oblivious-looking": ("representation:share=0.8", _as_it_is),
}

FULL_ONLY = {  # left out of a quick run: their kind stays in it
    "ours 80 %, mask read", "ours 80 %, tensor dropped", "ours 80 %, oblivious-looking", "noise 0.3",
    "every layer masked 40 %", "pruning 97 %, mask read", "pruning 99 %, mask read",
}  # fmt: skip


@dataclass(frozen=True)
class Metered(Record):
    """One update: what the meter says of it, and what the attack made of it."""

    setting: str
    oblivious: bool  # the server takes what arrives for an undefended gradient
    image: int
    meter: float
    mse: float
    rank: int
    prior: float  # what the meter says without an update
    blind: float  # MSE of the mean image


@dataclass(frozen=True)
class MeteredSetting:
    """All images of one setting, and their geometric means."""

    name: str
    images: Sequence[Metered]
    meter: float
    mse: float

    @property
    def oblivious(self) -> bool:
        return self.images[0].oblivious


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
        "An oblivious server takes the defended tensor for an undefended one: not the strongest attack, so not correlated.",  # noqa: E501
    )

    model: str = "lenet"
    dataset: str = "mnist"
    attack: str = "newton"
    floor: Positive = 1e-5  # noise that stands for rounding, relative; the attack's own last one
    images: Count = 32  # of every setting; quick: 1

    def work(self, context: Context) -> dict[str, tuple[int, str]]:
        names = [name for name in SETTINGS | OBLIVIOUS if context.full or name not in FULL_ONLY]
        return {f"{i} {name}": (i, name) for i in range(self._images(context)) for name in names}

    def _images(self, context: Context) -> int:
        return self.images if context.full else 1

    def run(self, unit: str, context: Context) -> list[Row]:
        i, name = self.work(context)[unit]
        scene = shared(self.dataset, self.model, self._images(context), context)
        spec, view = (SETTINGS | OBLIVIOUS)[name]
        seen = scene.observe_one(i, spec, context.seeds("defense", i, name), with_labels=True)
        known = build_defense(spec).servers(scene.model)
        server = known[0] if view is None else Countermeasure(name, "Looks at a part of the update.", view)
        trial = Trial(seen, server, self.attack, context.seeds("attack", i, name))
        truth, prior = scene.truth[i : i + 1].to(context.device), scene.public.prior
        assert prior is not None  # every scene has one unless told otherwise
        leak = leak_meter(trial.view, truth, floor=self.floor)
        (found,) = solved([trial])
        mse = float((found.inputs - truth.inputs).square().mean())
        blind = float((prior.mean - truth.inputs.reshape(-1)).square().mean())
        return [
            {"setting": name, "oblivious": name in OBLIVIOUS, "image": i, "meter": leak.mse, "mse": mse}
            | {"rank": leak.rank, "influence": _finite(leak.influence), "prior": leak.prior_mse, "blind": blind}
            | {"objective": found.objective, "converged": found.converged}
        ]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        metered = Metered.read(rows)
        lines: list[Row] = [
            {"setting": s.name, "images": len(s.images), "meter": f"{s.meter:.2g}", "attack MSE": f"{s.mse:.2g}",
             "attack / meter": f"{s.mse / s.meter:.2g}", "rank": min(m.rank for m in s.images)}
            for s in by_setting(metered)
        ]  # fmt: skip
        blind = f"{sum(m.blind for m in metered) / max(len(metered), 1):.2g}"
        return [*lines, {"setting": "(mean image)", "images": len({m.image for m in metered}), "attack MSE": blind}]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge whether the meter ranks the settings as the attack does, oblivious servers aside."""
        every = by_setting(Metered.read(rows))
        strongest = [s for s in every if not s.oblivious]
        if len(strongest) < 3:
            return []
        rho, r = correlations(strongest)
        ours = f"Spearman {rho:.2f}, correlation of logarithms {r:.2f}, {len(strongest)} settings"
        noisy = [s for s in strongest if s.meter > NOISY]
        if len(noisy) > 2:
            ours += f"; Spearman {correlations(noisy)[0]:.2f} over the {len(noisy)} with a meter above {NOISY:g}"
        if len(strongest) < len(every):
            ours += f" ({correlations(every)[0]:.2f} with the oblivious servers among them)"
        claim = "The leak meter predicts what the strongest attack reaches"
        rule = "Spearman's rank correlation of the settings' geometric means at least 0.9, oblivious servers left out"
        return [judge(claim, rho >= 0.9, rule, "not in the paper", ours)]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw attack MSE against the meter: all of it, and the part where noise decides, with names."""
        every = by_setting(Metered.read(rows))
        with figure(path, 12, 5) as empty:
            whole, part = empty.subplots(1, 2)
            _scatter(whole, every)
            whole.set_title("all settings")
            whole.legend(frameon=False, fontsize=7, loc="center")
            if noisy := [s for s in every if s.meter > NOISY]:
                _scatter(part, noisy)
                _names(part, noisy)
            part.set_title(f"settings with a meter above {NOISY:g}")
        return True


def by_setting(metered: Sequence[Metered]) -> list[MeteredSetting]:
    """Return the settings, each with its images and their means."""
    return [
        MeteredSetting(
            name, mine, geometric_mean(m.meter for m in mine), geometric_mean(max(m.mse, 1e-15) for m in mine)
        )
        for (name,), mine in group(metered, "setting").items()
    ]


def correlations(settings: Sequence[MeteredSetting]) -> tuple[float, float]:
    """Return Spearman's rank correlation of the settings' means, and Pearson's of their logarithms."""
    meters, errors = [s.meter for s in settings], [s.mse for s in settings]
    rho: Any = spearmanr(meters, errors)
    r: Any = pearsonr([log(m) for m in meters], [log(e) for e in errors])
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


def _scatter(axis: Any, settings: Sequence[MeteredSetting]) -> None:
    named: set[str] = set()
    for s in settings:
        mark, colour, label = KINDS[s.name.split()[0]]
        if s.oblivious:
            label = "ours, oblivious server"
        look = {"marker": mark, "edgecolors": colour, "facecolors": "none" if s.oblivious else colour}
        label, named = ("_" if label in named else label), named | {label}
        axis.scatter([m.meter for m in s.images], [m.mse for m in s.images], s=14, alpha=0.6, label=label, **look)
    every = [m for s in settings for m in s.images]
    ends = [min(m.meter for m in every) / 3, max(m.prior for m in every) * 3]
    axis.plot(ends, ends, color="grey", linewidth=0.8, linestyle="--")
    blind = fmean(m.blind for m in every)
    axis.axhline(blind, color="grey", linewidth=0.8, linestyle=":")
    axis.annotate("mean image", (ends[0], blind), xytext=(2, 3), textcoords="offset points", fontsize=7, color="grey")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("leak meter: Bayesian Cramér-Rao MSE")
    axis.set_ylabel("MSE that the attack reached")


def _names(axis: Any, settings: Sequence[MeteredSetting]) -> None:
    """Write each setting's name in one of two columns, in the order of the marks, with a line to its mean."""
    half = (len(settings) + 1) // 2
    for i, s in enumerate(sorted(settings, key=lambda s: s.meter)):
        place = (0.02, 0.55 + 0.28 * i / half) if i < half else (0.72, 0.05 + 0.35 * (i - half) / half)
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": "grey"}
        axis.annotate(s.name, (s.meter, s.mse), xytext=place, textcoords="axes fraction", fontsize=7, arrowprops=line)
