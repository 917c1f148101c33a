"""Does what was found about the paper's defence hold on data that it did not use? Fashion-MNIST beside its two."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gradveil.metrics import interval
from gradveil.ranges import Count
from gradveil.threats.rows import OBLIVIOUS, group
from gradveil_studies.paper.base import BLIND, ITEMS, SUCCESS, Context, Item, Judgement, Row, in_all, judge
from gradveil_studies.paper.figures import Dot, dot_panels
from gradveil_studies.paper.panels import FLOORS, AttackPanel, gs_attack
from gradveil_studies.paper.rows import HIDDEN, KNOWING, Case, Measured, cases, control_works, strongest

SHARES = (0.1, 0.2, 0.4, 0.8)
ANALYTIC = "analytic"
SMALLEST = 1e-7  # a lower MSE is drawn here


@ITEMS.register("fashion")
@dataclass(frozen=True)
class Fashion(Item):
    """The defence at four shares on three data sets: DLG, GS and Gauss-Newton, by oblivious and knowing servers."""

    title = "The paper's defence on Fashion-MNIST, beside MNIST and CIFAR-10"
    notes: ClassVar[tuple[str, ...]] = (
        "Not in the paper: its figures are of MNIST and CIFAR-10. The same settings on all three.",
        "An untrained sigmoid LeNet, one image a client. GS knows the label; the others read it off.",
        "A server that knows leaves the defended tensor out (drop) or reads the zeroed entries off it (mask). The "
        "division dW / db (analytic) is of the defended layer, since LeNet has no other dense one.",
        "Hidden goes by the mean image's error. An image may be hidden by that and still be told from 99 others: the "
        "column beside it says so.",
        f"Recovered: MSE under {SUCCESS:g}. An attack that does not recover half of the undefended images says nothing "
        "about a defence.",
    )

    images: Count = 16  # quick: 2
    steps: Count = 100  # outer steps of DLG; quick: 15
    restarts: Count = 2
    gs_steps: Count = 500  # quick: 50
    datasets: tuple[str, ...] = ("mnist", "fashion_mnist", "cifar10")
    network: str = "lenet"

    def work(self, context: Context) -> dict[str, AttackPanel]:
        full = context.full
        attacks = {
            "dlg": f"dlg:steps={self.steps if full else min(self.steps, 15)},restarts={self.restarts}",
            "newton": "newton",
            "gs": gs_attack(self.gs_steps if full else min(self.gs_steps, 50), context),
            ANALYTIC: ANALYTIC,
        }
        levels = ("none", *(f"representation:share={s}" for s in (SHARES if full else SHARES[2:3])))
        images = self.images if full else min(self.images, 2)
        panels = [
            AttackPanel(f"{name}-{d}", d, self.network, attack, images, levels, is_gs=name == "gs")
            for d in self.datasets
            for name, attack in attacks.items()
        ]
        return {panel.name: panel for panel in panels}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Attack the images of one panel under every defence, by every server."""
        panel = self.work(context)[unit]
        without = ("drop", "mask") if panel.attack == ANALYTIC else ()
        found = panel.rows((FLOORS, *panel.defenses), context, without=without)
        return [row for rows in found.values() for row in rows]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return what every server gets, and what a blind guess is worth."""
        measured = Measured.read(rows)
        found = cases(measured)
        table = [_line(case, control_works(found, case.panel)) for case in found]
        guesses = group((r for r in measured if r.defense == BLIND and r.panel.startswith("dlg")), "panel", "server")
        for (panel, guess), mine in guesses.items():
            line: Row = {"panel": panel.partition("-")[2], "defense": BLIND, "server": guess, "images": len(mine)}
            table.append(line | {"mse": f"{interval([r.mse for r in mine]):.4f}"})
        return table

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw, for each data set, what the best attack gets at each share, by oblivious and knowing servers."""
        found = cases(Measured.read(rows))
        useful = [case for case in found if control_works(found, case.panel)]
        panels: dict[str, list[Dot]] = {}
        for dataset, mine in _by_dataset(useful).items():
            for (defense, kind), same in group(mine, "defense", "kind").items():
                best = min(same, key=lambda case: case.mse.mean)
                values = [max(row.mse, SMALLEST) for row in best.rows]
                look = "none" if kind == OBLIVIOUS else "representation"
                panels.setdefault(dataset, []).append(Dot.of(f"{defense}, {kind}", values, look))
        blind = {dataset: {"mean image": mine[0].blind} for dataset, mine in _by_dataset(useful).items()}
        dot_panels(path, panels, "MSE", log=True, lines=blind)
        return True

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge, data set by data set, whether images are hidden from an oblivious server, and from one that knows."""
        found = cases(Measured.read(rows))
        useful = [case for case in found if control_works(found, case.panel)]
        oblivious = _by_dataset([c for c in useful if c.server == OBLIVIOUS and c.defense != "none"])
        knowing = _by_dataset([c for c in strongest(useful, KNOWING) if c.defense != "none" and c.kind == KNOWING])
        hidden = {d: all(c.hidden for c in mine) for d, mine in oblivious.items()}
        back = {d: all(any(c.success.mean >= 0.5 for c in same) for same in group(mine, "defense").values())
                for d, mine in knowing.items()}  # fmt: skip
        paper = "its figures: unrecognisable on MNIST and CIFAR-10"
        return [
            judge(
                "The oblivious server gets nothing at any share, on any of the data sets",
                in_all(hidden, "on"), HIDDEN + ", for every attack whose control succeeds", paper, _said(oblivious),
            ),
            judge(
                "A server that knows the defence recovers the images at every share, on all of the data sets",
                in_all(back, "on"), f"some attack has MSE < {SUCCESS:g} on half of the images", "not considered",
                _said(knowing),
            ),
        ]  # fmt: skip


def _by_dataset(found: Sequence[Case]) -> dict[str, list[Case]]:
    names: dict[str, list[Case]] = {}
    for case in found:
        names.setdefault(case.rows[0].dataset, []).append(case)
    return names


def _said(found: Mapping[str, Sequence[Case]]) -> str:
    """Return the lowest MSE over attacks, at the share where it is highest, by data set."""
    said = []
    for dataset, mine in found.items():
        best = [min(c.mse.mean for c in same) for same in group(mine, "defense").values()]
        said.append(f"{dataset}: MSE {min(best):.2g} to {max(best):.2g}, blind guess {mine[0].blind:.2g}")
    return "; ".join(said) or "-"


def _line(case: Case, control: bool | None) -> Row:
    return {
        "panel": case.panel,
        "defense": case.defense,
        "server": case.server,
        "images": len(case.rows),
        "mse": f"{case.mse:.4f}",
        "recovered": f"{case.success:.0%}",
        "told apart": f"{case.identified:.0%}",
        "hidden": "yes" if case.hidden else "no",
        "control": {True: "succeeds", False: "fails", None: "not run"}[control],
    }
