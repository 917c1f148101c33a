"""The paper's Table 2, the range of every defence's setting: the levels that are run, and what each does to updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from gradveil.data import load
from gradveil.federated.client import step_gradient
from gradveil.metrics import interval
from gradveil.models import build
from gradveil.modules import find_layer
from gradveil.protection.defense import NoDefense
from gradveil.protection.passes import Report
from gradveil.ranges import Count
from gradveil.threats.rows import group
from gradveil.tree import Params, flatten, norm
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, judge, papers_defense, published
from gradveil_studies.paper.figures import Dot, dot_panels
from gradveil_studies.paper.panels import FULL, NORMALISED, AttackPanel
from gradveil_studies.paper.rows import Record, family, level
from gradveil_studies.paper.tradeoff import Tradeoff

NAMES = {  # of the table's lines: defence, factor from its setting to the table's unit
    "GC: p_model (%)": ("pruning", 100.0),
    "DP-Gaussian: sigma": ("gaussian", 1.0),
    "DP-Laplace: sigma": ("laplace", 1.0),
    "Ours: p_fc (%)": ("representation", 100.0),
}


@dataclass(frozen=True)
class Effect(Record):
    """What a defence does to the update of one image."""

    panel: str
    defense: str
    zeroed_layer: float  # share of the last layer's entries that were sent as zero
    zeroed: float  # of all entries
    change: float  # ||defended - plain|| / ||plain||
    live: int  # entries of r that are not zero
    taken: int  # of those


@ITEMS.register("table2")
@dataclass(frozen=True)
class Table2(Item):
    """The grid of the trade-off figure beside the paper's ranges, measured on undefended updates."""

    title = "Table 2: the settings of every defence, and what each level does to an update"
    notes: ClassVar[tuple[str, ...]] = (
        "The paper gives ranges, not the levels within; those of the trade-off figure are listed.",
        "Change: ||defended - plain|| / ||plain|| of the whole gradient. Live: entries of r that are not zero.",
    )

    images: Count = 8  # quick: 2
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    networks: tuple[str, str] = ("lenet", NORMALISED)

    def work(self, context: Context) -> dict[str, AttackPanel]:
        """Return the panels of the full trade-off figure, at every scale."""
        return Tradeoff(datasets=self.datasets, networks=self.networks).panels(Context(scale="full"))

    def run(self, unit: str, context: Context) -> list[Row]:
        """Measure what every level does to the updates of a few images."""
        panel = self.work(context)[unit]
        dataset = load(panel.dataset, context.data)
        model = build(panel.model, dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
        model.to(context.device)
        count = self.images if context.full else min(self.images, 2)
        batch = dataset.train.sample(count, context.seeds("images"))
        rows = []
        for i in range(len(batch)):
            one = batch[i : i + 1].to(context.device)
            plain = step_gradient(model, one, NoDefense(), context.seeds("plain", i))
            for spec in panel.defenses:
                report, rng = Report(), context.seeds("defense", spec, i)
                sent = step_gradient(model, one, papers_defense(spec), rng, report=report)
                effect = _effect(plain, sent, f"{find_layer(model)}.weight")
                live = {"live": report.live, "taken": report.removed}
                rows.append({"panel": unit, "model": panel.model, "defense": spec, "image": i} | effect | live)
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return a line per panel and level, the paper's range beside it."""
        table = []
        for (panel, defense), mine in group(Effect.read(rows), "panel", "defense").items():
            live = sum(e.live for e in mine)
            table.append(
                {
                    "panel": panel,
                    "defense": defense,
                    "paper's range": paper_range(panel, defense),
                    "zeroed, last layer": f"{fmean(e.zeroed_layer for e in mine):.1%}",
                    "zeroed, all": f"{fmean(e.zeroed for e in mine):.1%}",
                    "live entries of r taken": f"{sum(e.taken for e in mine) / live:.0%}" if live else "-",
                    "change": f"{interval([e.change for e in mine]):.3g}",
                }
            )
        return table

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw how much of an update every level changes, mean and range over images."""
        panels: dict[str, list[Dot]] = {}
        for (panel, defense), mine in group(Effect.read(rows), "panel", "defense").items():
            if any(e.change for e in mine):
                panels.setdefault(panel, []).append(Dot.of(defense, [e.change for e in mine], family(defense)))
        dot_panels(path, panels, "||defended - plain|| / ||plain||", log=True)
        return True

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge whether the levels lie in the paper's ranges and reach their upper ends."""
        verdicts = []
        for line, (name, factor) in NAMES.items():
            for attack, (low, high) in published()["table2"]["rows"][line].items():
                run = sorted(factor * level(d) for d in FULL[attack] if family(d) == name)
                inside = run[0] >= low * (1 - 1e-9) and abs(run[-1] - high) <= 1e-9 * high
                verdicts.append(
                    judge(
                        f"{line}, {attack.upper()}: the levels run are the paper's",
                        inside,
                        "all levels within the paper's range, the highest at its upper end",
                        f"{low:g} to {high:g}",
                        ", ".join(f"{v:g}" for v in run),
                    )
                )
        return verdicts


def paper_range(panel: str, defense: str) -> str:
    """Return the paper's range for a defence on a panel, as text."""
    for line, (name, _) in NAMES.items():
        if family(defense) == name:
            low, high = published()["table2"]["rows"][line][panel.partition("-")[0]]
            return f"{low:g} to {high:g}{' %' if '%' in line else ''}"
    return "-"


def _effect(plain: Params, sent: Params, layer: str) -> Row:
    """Return the shares of entries that were sent as zero, and the relative change of the gradient."""
    everything = flatten(sent)
    change = norm({name: sent[name] - g for name, g in plain.items()}) / norm(plain)
    return {
        "zeroed_layer": float((sent[layer] == 0).float().mean()),
        "zeroed": float((everything == 0).float().mean()),
        "zero_before": float((plain[layer] == 0).float().mean()),
        "change": float(change),
    }
