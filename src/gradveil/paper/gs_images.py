"""The paper's figure of images rebuilt by GS: ours against pruning (GC) at the same rates, 50 to 90 %."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gradveil.metrics import interval
from gradveil.paper.attack_points import FLOORS, AttackPoints, Point, encoded, servers
from gradveil.paper.base import ITEMS, Context, Item, Row, Verdict, published
from gradveil.paper.settings import (
    HIDDEN,
    KNOWING,
    NAIVE,
    Setting,
    control_works,
    own,
    select,
    settings,
    strongest,
)
from gradveil.paper.tradeoff import GS_STEPS, NORMALISED, Panel, Tradeoff, gs_attack

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

    def panel(self, context: Context) -> Panel:
        """Return what is attacked: the scene of the trade-off figure's GS panel."""
        quick = Tradeoff(quick_images=2 * self.quick_images, datasets=(self.dataset,)).panels(context)
        full = gs_attack(self.steps, context)
        model, attack = (self.network, full) if context.full else _of(quick[f"gs-{self.dataset}"])
        images = self.images if context.full else self.quick_images
        return Panel(self.spec_name, self.dataset, model, attack, images, self.defenses(), is_gs=True)

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

    def verdicts(self, rows: Sequence[Row]) -> list[Verdict]:
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
        from gradveil.paper.gs_images_figure import draw

        draw([r for r in own(rows) if "picture" in r], path, RATES)
        return True


def _of(panel: Panel) -> tuple[str, str]:
    return panel.model, panel.attack


def _rate(s: Setting) -> float:
    return float(s.defense.partition("=")[2])


def _said(found: Sequence[Setting]) -> str:
    return "; ".join(f"{_rate(s):.0%}: MSE {s.mse.mean:.4f}, told apart {s.identified.mean:.0%}" for s in found)


def _ours(found: Sequence[Setting], kind: str, wanted: Sequence[float], works: bool | None) -> Verdict:
    hidden = [s.hidden for s in found if _rate(s) >= max(wanted)]
    return _judged(
        f"Ours makes the image unrecognisable from 50-60 % on ({_who(kind)})",
        all(hidden) if works and hidden else None,
        f"at every rate from {max(wanted):.0%} on",
        "unrecognisable when only 50-60 % of the parameters of the layer are pruned",
        found,
    )


def _gc(found: Sequence[Setting], kind: str, wanted: float, works: bool | None) -> Verdict:
    hidden = [s.hidden for s in found if _rate(s) <= wanted]
    return _judged(
        f"Under GC the image is recognisable until 80 % ({_who(kind)})",
        not any(hidden) if works and hidden else None,
        f"at no rate up to {wanted:.0%}",
        "still recognisable when 80 % of the whole model are pruned",
        found,
    )


def _judged(claim: str, holds: bool | None, where: str, paper: str, found: Sequence[Setting]) -> Verdict:
    status = "not measured" if holds is None else "reproduced" if holds else "not reproduced"
    rule = f"{where}: {HIDDEN}; the undefended control must work"
    return Verdict(claim, status, rule, paper, _said(found) or "-")


def _who(kind: str) -> str:
    return "naive server" if kind == NAIVE else "server that knows"
