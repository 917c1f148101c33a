"""The paper's figure of images rebuilt by GS: ours against pruning (GC) at the same rates, 50 to 90 %."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.metrics import interval
from gradveil.paper.attack_points import FLOORS, AttackPoints, Point, encoded, servers
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row, published
from gradveil.paper.figures import figure
from gradveil.paper.settings import (
    HIDDEN,
    KNOWING,
    NAIVE,
    Case,
    control_works,
    own,
    select,
    settings,
    strongest,
)
from gradveil.paper.tradeoff import GS_STEPS, NORMALISED, AttackPanel, Tradeoff, gs_attack

LINES = (
    ("representation", "naive", "ours,\nnaive server"),
    ("representation", "mask", "ours,\nreads the mask"),
    ("representation", "drop", "ours,\ndrops the layer"),
    ("pruning", "naive", "GC,\nnaive server"),
    ("pruning", "mask", "GC,\nreads the mask"),
)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
OURS, GC = "representation", "pruning"
TRUTH = "(truth)"


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

    images: int = 32
    shown: int = 2  # whose reconstructions are kept and drawn
    quick_images: int = 2
    steps: int = GS_STEPS
    network: str = NORMALISED
    dataset: str = "cifar10"

    def panel(self, context: Context) -> AttackPanel:
        """Return what is attacked: the scene of the trade-off figure's GS panel."""
        quick = Tradeoff(quick_images=2 * self.quick_images, datasets=(self.dataset,)).panels(context)
        full = gs_attack(self.steps, context)
        model, attack = (self.network, full) if context.full else _of(quick[f"gs-{self.dataset}"])
        images = self.images if context.full else self.quick_images
        return AttackPanel(self.spec_name, self.dataset, model, attack, images, self.defenses(), is_gs=True)

    def defenses(self) -> tuple[str, ...]:
        """Return none, and both defences at every rate."""
        return ("none", *(f"{name}:share={rate}" for name in (OURS, GC) for rate in RATES))

    def units(self, context: Context) -> list[str]:
        """Return the blind guesses (with the originals) and the defences."""
        return [FLOORS, *self.defenses()]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images under one defence, by every server."""
        return self.run_group([unit], context)[unit]

    def run_group(self, units: Sequence[str], context: Context) -> dict[str, list[Row]]:
        """Run units at once, solved together."""
        panel = self.panel(context)
        points = panel.points(context)
        asked = [Point(d, s) for d in units if d != FLOORS for s in servers(d, points.scene.model, panel.against_noise)]
        rows = points.rows(asked, self.shown) if asked else []
        floors = [*points.floors(), *self._originals(points)] if FLOORS in units else []
        place = {"panel": panel.name, "dataset": panel.dataset, "model": panel.model}
        return {
            unit: [place | r for r in (floors if unit == FLOORS else (r for r in rows if r["defense"] == unit))]
            for unit in units
        }

    def _originals(self, points: AttackPoints) -> list[Row]:
        shown = points.scene.truth.inputs[: self.shown]
        return [
            {"defense": TRUTH, "server": TRUTH, "attack": "none", "image": i, "picture": encoded(x)}
            for i, x in enumerate(shown)
        ]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return MSE, PSNR, SSIM and identification for every defence, rate and server."""
        mine = [r for r in own(rows) if r["defense"] != TRUTH]
        table = []
        for defense, server in dict.fromkeys((r["defense"], r["server"]) for r in mine):
            chosen = select(mine, self.spec_name, defense, server)
            name, _, share = defense.partition(":share=")
            mse, psnr, ssim = (interval([r[key] for r in chosen]) for key in ("mse", "psnr", "ssim"))
            table.append(
                {
                    "defense": {OURS: "ours", GC: "GC"}.get(name, name),
                    "rate": f"{float(share):.0%}" if share else "-",
                    "server": server,
                    "images": len(chosen),
                    "mse": f"{mse.mean:.4f} [{mse.low:.4f}, {mse.high:.4f}]",
                    "psnr": f"{psnr.mean:.1f}",
                    "ssim": f"{ssim.mean:.2f}",
                    "identified": f"{interval([r['identified'] for r in chosen]).mean:.0%}",
                }
            )
        return table

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge both sentences of the paper, for a server that does not know the defence and for one that does."""
        found = settings([r for r in own(rows) if r["defense"] != TRUTH], [])
        works = control_works(found, self.spec_name)
        paper = published()["gs_images"]
        verdicts = []
        for kind in (NAIVE, KNOWING):
            best = {s.defense: s for s in strongest(found, kind)}
            ours, gc = ([best[d] for d in self.defenses() if d in best and d.startswith(n)] for n in (OURS, GC))
            verdicts.append(_ours(ours, kind, paper["ours_unrecognisable_from"], works))
            verdicts.append(_gc(gc, kind, paper["gc_recognisable_until"], works))
        return verdicts

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw original, undefended, and every rate, for the images whose reconstructions were kept."""

        draw([r for r in own(rows) if "picture" in r], path, RATES)
        return True


def _of(panel: AttackPanel) -> tuple[str, str]:
    return panel.model, panel.attack


def _rate(s: Case) -> float:
    return float(s.defense.partition("=")[2])


def _said(found: Sequence[Case]) -> str:
    return "; ".join(f"{_rate(s):.0%}: MSE {s.mse.mean:.4f}, told apart {s.identified.mean:.0%}" for s in found)


def _ours(found: Sequence[Case], kind: str, wanted: Sequence[float], works: bool | None) -> Judgement:
    hidden = [s.hidden for s in found if _rate(s) >= max(wanted)]
    return _judged(
        f"Ours makes the image unrecognisable from 50-60 % on ({_who(kind)})",
        all(hidden) if works and hidden else None,
        f"at every rate from {max(wanted):.0%} on",
        "unrecognisable when only 50-60 % of the parameters of the layer are pruned",
        found,
    )


def _gc(found: Sequence[Case], kind: str, wanted: float, works: bool | None) -> Judgement:
    hidden = [s.hidden for s in found if _rate(s) <= wanted]
    return _judged(
        f"Under GC the image is recognisable until 80 % ({_who(kind)})",
        not any(hidden) if works and hidden else None,
        f"at no rate up to {wanted:.0%}",
        "still recognisable when 80 % of the whole model are pruned",
        found,
    )


def _judged(claim: str, holds: bool | None, where: str, paper: str, found: Sequence[Case]) -> Judgement:
    status = "not measured" if holds is None else "reproduced" if holds else "not reproduced"
    rule = f"{where}: {HIDDEN}; the undefended control must work"
    return Judgement(claim, status, rule, paper, _said(found) or "-")


def _who(kind: str) -> str:
    return "naive server" if kind == NAIVE else "server that knows"


def draw(rows: Sequence[Row], path: Path, rates: Sequence[float]) -> None:
    """Write ``path`` with the endings .svg and .png: one block of lines for each image."""
    kept = {(r["defense"], r["server"], r["image"]): r for r in rows}
    images = sorted({r["image"] for r in rows})
    lines = len(LINES) * max(1, len(images))
    with figure(path, 1.15 * (len(rates) + 3), 1.2 * lines) as empty:
        axes = empty.subplots(lines, len(rates) + 3, squeeze=False)  # original, undefended, words, rates
        for axis in axes.flat:
            axis.set_axis_off()
        for block, image in enumerate(images):
            top = block * len(LINES)
            _show(axes[top, 0], kept.get(("(truth)", "(truth)", image)), "original")
            _show(axes[top, 1], kept.get(("none", "naive", image)), "no defence")
            for line, (defense, server, words) in enumerate(LINES, start=top):
                axes[line, 2].text(0.5, 0.5, words, fontsize=7, ha="center", va="center")
                for column, rate in enumerate(rates, start=3):
                    row = kept.get((f"{defense}:share={rate}", server, image))
                    _show(axes[line, column], row, f"{rate:.0%}" if line == top else "")


def _show(axis: Any, row: Row | None, words: str) -> None:
    if row is None:
        return
    pixels = decoded(row["picture"])
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    mse = f"MSE {row['mse']:.3f}" if "mse" in row else ""
    axis.set_title("\n".join(filter(None, (words, mse))), fontsize=7, pad=2)


def decoded(text: str) -> NDArray[np.uint8]:
    """Return the pixels (H, W) or (H, W, 3) of a picture that a row holds."""
    data = base64.b64decode(text.partition("base64,")[2])
    return np.asarray(Image.open(io.BytesIO(data)))
