"""The paper's figure of images rebuilt by GS: ours against pruning (GC) at the same rates, 50 to 90 %."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.metrics import interval
from gradveil.ranges import Count, Whole
from gradveil.threats.rows import OBLIVIOUS, group
from gradveil_studies.paper.base import CIFAR10, ITEMS, SUCCESS, Context, Item, Judgement, Row, in_all, judge, published
from gradveil_studies.paper.figures import PROMISED, REACHED, Dot, dot_panels, figure
from gradveil_studies.paper.panels import FLOORS, GS_STEPS, NORMALISED, AttackPanel, encoded, gs_attack
from gradveil_studies.paper.rows import HIDDEN, KNOWING, Case, Measured, cases, control_works, family, level, strongest
from gradveil_studies.paper.tradeoff import Tradeoff

OURS, GC = "representation:share=0.1", "pruning:share=0.8"
QUICK_NETWORK = "lenet:activation=relu,init=default,strides=2/1/1/1,width=24"
SHOWN = {"none": "none (control)", OURS: "ours, 10 % of r", GC: "GC, 80 %"}


@dataclass(frozen=True)
class Choice:
    """One way to run GS: how it differs from the figures' way."""

    why: str
    settings: str = ""
    times: float = 1.0  # as many iterations
    normalised: bool = True  # inputs
    weights: int = 0  # which draw of the initial weights


CHOICES = {
    "as in the figures": Choice(
        "normalised inputs; step 0.1 and smoothness 1e-4 in pixels; uniform start; 500 iterations"
    ),
    "120 iterations": Choice("the number in the paper's text", times=120 / GS_STEPS),
    "1000 iterations": Choice("twice as many", times=1000 / GS_STEPS),
    "central start": Choice("N(0, 1) of normalised images", ",start=central"),
    "step 0.025": Choice("0.1 of normalised images", ",lr=0.025"),
    "smoothness 4e-4": Choice("1e-4 of normalised images", ",tv=4e-4"),
    "normalised units": Choice(
        "the last three and 1000 iterations: as it is where images are normalised before the attack",
        ",start=central,lr=0.025,tv=4e-4",
        times=1000 / GS_STEPS,
    ),
    "smoothness 0.01": Choice("a server that trusts smoothness more; it need not know of a defence", ",tv=0.01"),
    "raw inputs": Choice("in [0, 1], no normalisation in the network", normalised=False),
    "other weights": Choice("a second draw of the initial weights", weights=1),
    "third weights": Choice("a third draw", weights=2),
}


@ITEMS.register("gs-choices")
@dataclass(frozen=True)
class GSChoices(Item):
    """GS with one open choice changed at a time: none, ours 10 % and pruning 80 %, oblivious and knowing servers."""

    title = "GS: what the choices do that the paper leaves open (ConvNet, CIFAR-10)"
    notes: ClassVar[tuple[str, ...]] = (
        "A check of our own. The same images in every line, and the same weights but for the last two.",
        "Where the oblivious server ends under ours has little to do with the image: with the same weights the objective "  # noqa: E501
        "that it reaches is the same within a few percent under every choice, while the MSE is set by how far a step "
        "goes and by how smooth an image has to be. So an MSE above the mean image's says that the search failed, and "
        "how far above says what settings it failed with.",
        "Another draw of the weights changes nothing for ours; for pruning it moves the oblivious server's MSE by up "
        "to a fifth.",
        "More smoothness than in the figures blurs what could be had exactly (the control, the server that knows).",
        "; ".join(f"*{name}*: {choice.why}" for name, choice in CHOICES.items()) + ".",
    )

    images: Count = 32
    steps: Count = GS_STEPS
    networks: tuple[str, str] = (NORMALISED, "convnet")  # normalised inputs, and not
    dataset: str = "cifar10"
    quick_images: Count = 1
    quick_steps: Count = 200
    quick_networks: tuple[str, str] = (f"{QUICK_NETWORK},{CIFAR10}", QUICK_NETWORK)

    def panel(self, name: str, context: Context) -> AttackPanel:
        choice = CHOICES[name]
        networks = self.networks if context.full else self.quick_networks
        steps = round(choice.times * (self.steps if context.full else self.quick_steps))
        images = self.images if context.full else self.quick_images
        attack = gs_attack(steps, context) + choice.settings
        model = networks[not choice.normalised]
        return AttackPanel(name, self.dataset, model, attack, images, tuple(SHOWN), is_gs=True, weights=choice.weights)

    def work(self, context: Context) -> dict[str, AttackPanel]:
        return {name: self.panel(name, context) for name in CHOICES}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images under one choice: every defence, every server, all at once; and the blind guesses.

        Without the server that drops the tensor: in the figures it is behind or level with the mask.
        """
        rows = self.work(context)[unit].rows((FLOORS, *SHOWN), context, without=("drop",))
        return [row for mine in rows.values() for row in mine]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return per choice, defence and server the MSE, its normalised unit, the objective reached and the success."""
        return [
            {
                "choice": case.panel,
                "defense": case.defense,
                "server": case.server,
                "images": case.mse.count,
                "mse": f"{case.mse:.4f}",
                "normalised, mean": f"{fmean(r.normalised_mse for r in case.rows):.3f}",
                "objective": f"{fmean(r.objective for r in case.rows):.4f}",
                "ssim": f"{case.ssim:.2f}",
                "success": f"{case.success.mean:.0%}",
                "mean image": f"{case.blind:.4f}",
            }
            for case in cases(Measured.read(rows))
        ]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        found = cases(Measured.read(rows))
        control = {case.panel: case for case in found if case.defense == "none"}
        works = {name: control_works(found, name) is True for name in control}
        oblivious, knowing = (
            {case.panel: case for case in strongest(found, kind) if case.defense == OURS and works.get(case.panel)}
            for kind in (OBLIVIOUS, KNOWING)
        )
        half = f"at least half of the images with clamped MSE < {SUCCESS}"
        return [
            _under("the attack recovers undefended images (control)",
                   f"{half}; else what is below is not judged under it", works, control),
            _under("ours (10 %) makes images unrecognisable to a server that does not know it", HIDDEN,
                   {name: case.hidden for name, case in oblivious.items()}, oblivious),
            _under("a server that knows ours (10 %) recovers the images", f"at least half with clamped MSE < {SUCCESS}",
                   {name: case.success.mean >= 0.5 for name, case in knowing.items()}, knowing),
        ]  # fmt: skip

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the mean clamped MSE under every choice, a panel for each defence."""
        defenses = group(cases(Measured.read(rows)), "defense")
        panels, lines = {}, {}
        for defense, title in SHOWN.items():
            if mine := defenses.get((defense,)):
                panels[title] = [
                    Dot(
                        case.panel + ("" if defense == "none" else f", {case.kind}"),
                        case.mse,
                        PROMISED if case.kind == OBLIVIOUS else REACHED,
                    )
                    for case in mine
                ]
                lines[title] = {"blind guess (mean image)": mine[0].blind}
        dot_panels(path, panels, "clamped MSE, mean over images", log=True, lines=lines)
        return True


def _under(claim: str, rule: str, holds: dict[str, bool], of: dict[str, Case]) -> Judgement:
    """Return the verdict on a claim that was looked at under several choices."""
    ours = ", ".join(f"{name}: MSE {of[name].mse.mean:.4f}" for name in holds)
    return judge(f"GS: {claim}, whatever the choice", in_all(holds, "under:"), rule, "one way to run GS", ours)


LINES = (
    ("representation", "oblivious", "ours,\noblivious server"),
    ("representation", "mask", "ours,\nreads the mask"),
    ("representation", "drop", "ours,\ndrops the layer"),
    ("pruning", "oblivious", "GC,\noblivious server"),
    ("pruning", "mask", "GC,\nreads the mask"),
)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
OURS, GC = "representation", "pruning"
TRUTH = "(truth)"
RULE = f"{HIDDEN}; the undefended control must work"


@ITEMS.register("gs-images")
@dataclass(frozen=True)
class GSImages(Item):
    """Images rebuilt by GS under ours and under pruning, by a server that does not know of it and by one that does."""

    title = "Figure: images rebuilt by GS, ours against GC at the same pruning rates (CIFAR-10)"
    source: ClassVar[str] = "gs_images"
    notes: ClassVar[tuple[str, ...]] = (
        "The rate of ours is of the entries of r (the paper's p_fc), that of GC of every tensor's gradient (p_model).",
        "On a ReLU network about half of r is dead: from 50-60 % on, ours has zeroed every live entry, and a higher "
        "rate changes nothing.",
        f"Unrecognisable is judged by a rule, not by eye: {HIDDEN}.",
    )

    images: Count = 32
    shown: Whole = 2  # whose reconstructions are kept and drawn
    quick_images: Count = 2
    steps: Count = GS_STEPS
    network: str = NORMALISED
    dataset: str = "cifar10"

    def panel(self, context: Context) -> AttackPanel:
        """Return what is attacked: the scene of the trade-off figure's GS panel."""
        quick = Tradeoff(quick_images=2 * self.quick_images, datasets=(self.dataset,)).panels(context)
        full = gs_attack(self.steps, context)
        panel = quick[f"gs-{self.dataset}"]
        model, attack = (self.network, full) if context.full else (panel.model, panel.attack)
        images = self.images if context.full else self.quick_images
        return AttackPanel(self.spec_name, self.dataset, model, attack, images, self.defenses(), is_gs=True)

    def defenses(self) -> tuple[str, ...]:
        return ("none", *(f"{name}:share={rate}" for name in (OURS, GC) for rate in RATES))

    def work(self, context: Context) -> dict[str, str]:
        """Return the blind guesses (with the originals) and the defences."""
        return {what: what for what in (FLOORS, *self.defenses())}

    def run(self, unit: str, context: Context) -> list[Row]:
        return self.run_group([unit], context)[unit]

    def run_group(self, units: Sequence[str], context: Context) -> dict[str, list[Row]]:
        panel = self.panel(context)
        rows = panel.rows(units, context, self.shown)
        if FLOORS in rows:
            place: Row = {"panel": panel.name, "dataset": panel.dataset, "model": panel.model}
            place |= {"defense": TRUTH, "server": TRUTH, "attack": "none"}
            shown = panel.points(context).scene.truth.inputs[: self.shown]
            rows[FLOORS] += [place | {"image": i, "picture": encoded(x)} for i, x in enumerate(shown)]
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return MSE, PSNR, SSIM and identification for every defence, rate and server."""
        table = []
        for (defense, server), mine in group(_attacked(rows), "defense", "server").items():
            name = family(defense)
            table.append(
                {
                    "defense": {OURS: "ours", GC: "GC"}.get(name, name),
                    "rate": f"{level(defense):.0%}" if name in (OURS, GC) else "-",
                    "server": server,
                    "images": len(mine),
                    "mse": f"{interval([r.mse for r in mine]):.4f}",
                    "psnr": f"{fmean(r.psnr for r in mine):.1f}",
                    "ssim": f"{fmean(r.ssim for r in mine):.2f}",
                    "identified": f"{fmean(r.identified for r in mine):.0%}",
                }
            )
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge both sentences of the paper, for a server that does not know the defence and for one that does."""
        found = cases(_attacked(rows))
        works = control_works(found, self.spec_name)
        paper = published()["gs_images"]
        least, most = max(paper["ours_unrecognisable_from"]), paper["gc_recognisable_until"]
        verdicts = []
        for kind, who in ((OBLIVIOUS, "oblivious server"), (KNOWING, "server that knows")):
            best = {case.defense: case for case in strongest(found, kind)}
            ours, gc = ([best[d] for d in self.defenses() if d in best and family(d) == name] for name in (OURS, GC))
            hidden = [case.hidden for case in ours if level(case.defense) >= least]
            shown = [not case.hidden for case in gc if level(case.defense) <= most]
            verdicts += [
                judge(
                    f"Ours makes the image unrecognisable from 50-60 % on ({who})",
                    all(hidden) if hidden else None,
                    f"at every rate from {least:.0%} on: {RULE}",
                    "unrecognisable when only 50-60 % of the parameters of the layer are pruned",
                    _said(ours),
                    control=works,
                ),
                judge(
                    f"Under GC the image is recognisable until 80 % ({who})",
                    all(shown) if shown else None,
                    f"at no rate up to {most:.0%}: {RULE}",
                    "still recognisable when 80 % of the whole model are pruned",
                    _said(gc),
                    control=works,
                ),
            ]
        return verdicts

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw original, undefended, and every rate, for the images whose reconstructions were kept: a block each."""
        kept = {(r.defense, r.server, r.image): r for r in Measured.read(rows) if r.picture is not None}
        images = sorted({r.image for r in kept.values()})
        lines = len(LINES) * max(1, len(images))
        with figure(path, 1.15 * (len(RATES) + 3), 1.2 * lines) as empty:
            axes = empty.subplots(lines, len(RATES) + 3, squeeze=False)  # original, undefended, words, rates
            for axis in axes.flat:
                axis.set_axis_off()
            for top, image in zip(range(0, lines, len(LINES)), images, strict=False):
                _show(axes[top, 0], kept.get((TRUTH, TRUTH, image)), "original")
                _show(axes[top, 1], kept.get(("none", OBLIVIOUS, image)), "no defence")
                for line, (defense, server, words) in enumerate(LINES, start=top):
                    axes[line, 2].text(0.5, 0.5, words, fontsize=7, ha="center", va="center")
                    for column, rate in enumerate(RATES, start=3):
                        row = kept.get((f"{defense}:share={rate}", server, image))
                        _show(axes[line, column], row, f"{rate:.0%}" if line == top else "")
        return True


def _attacked(rows: Sequence[Row]) -> list[Measured]:
    return [r for r in Measured.read(rows) if r.defense != TRUTH]


def _said(found: Sequence[Case]) -> str:
    return "; ".join(f"{level(case.defense):.0%}: {case.got}" for case in found) or "-"


def _show(axis: Any, row: Measured | None, words: str) -> None:
    if row is None or row.picture is None:
        return
    axis.imshow(decoded(row.picture), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    mse = "" if isnan(row.mse) else f"MSE {row.mse:.3f}"
    axis.set_title("\n".join(filter(None, (words, mse))), fontsize=7, pad=2)


def decoded(text: str) -> NDArray[np.uint8]:
    """Return the pixels (H, W) or (H, W, 3) of a picture that a row holds."""
    data = base64.b64decode(text.partition("base64,")[2])
    return np.asarray(Image.open(io.BytesIO(data)))
