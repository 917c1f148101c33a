"""The paper's Table 2, the range of every defence's setting: the levels that are run, and what each does to updates."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from gradveil.data import load
from gradveil.defenses.base import build as build_defense
from gradveil.defenses.guard.passes import Report
from gradveil.defenses.guard.step import step_gradient
from gradveil.layers.modules import find_layer
from gradveil.metrics import interval
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row, published
from gradveil.paper.figures import Dot, dot_panels
from gradveil.paper.settings import own
from gradveil.paper.tradeoff import FULL, NORMALISED, AttackPanel, Tradeoff
from gradveil.tree import Params, flatten, norm
from gradveil.types import Batch

NAMES = {  # of the table's lines: defence, factor from its setting to the table's unit
    "GC: p_model (%)": ("pruning", 100.0),
    "DP-Gaussian: sigma": ("gaussian", 1.0),
    "DP-Laplace: sigma": ("laplace", 1.0),
    "Ours: p_fc (%)": ("representation", 100.0),
}


@ITEMS.register("table2")
@dataclass(frozen=True)
class Table2(Item):
    """The grid of the trade-off figure beside the paper's ranges, measured on undefended updates."""

    title = "Table 2: the settings of every defence, and what each level does to an update"
    notes: ClassVar[tuple[str, ...]] = (
        "The paper gives ranges, not the levels within; those of the trade-off figure are listed.",
        "Change: ||defended - plain|| / ||plain|| of the whole gradient. Live: entries of r that are not zero.",
    )

    images: int = 8  # quick: 2
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    networks: tuple[str, ...] = ("lenet", NORMALISED)

    def panels(self) -> dict[str, AttackPanel]:
        """Return the panels of the full trade-off figure."""
        return Tradeoff(datasets=self.datasets, networks=self.networks).panels(Context(scale="full"))

    def units(self, context: Context) -> list[str]:
        """Return the panels."""
        return list(self.panels())

    def run(self, unit: str, context: Context) -> list[Row]:
        """Measure what every level does to the updates of a few images."""
        panel = self.panels()[unit]
        dataset = load(panel.dataset, context.data)
        model = build(panel.model, dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
        model.to(context.device)
        count = self.images if context.full else min(self.images, 2)
        order = torch.randperm(len(dataset.train), generator=context.seeds("images"))[:count]
        batch = dataset.train.batch(order)
        rows = []
        for i in range(len(batch)):
            one = Batch(batch.inputs[i : i + 1].to(context.device), batch.labels[i : i + 1].to(context.device))
            plain = step_gradient(model, one, build_defense("none"), context.seeds("plain", i))
            for spec in panel.defenses:
                report, rng = Report(), context.seeds("defense", spec, i)
                sent = step_gradient(model, one, build_defense(spec), rng, report=report)
                effect = _effect(plain, sent, f"{find_layer(model)}.weight")
                live = {"live": report.live, "taken": report.removed}
                rows.append({"panel": unit, "model": panel.model, "defense": spec, "image": i} | effect | live)
        return rows

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return a line per panel and level, the paper's range beside it."""
        table = []
        for panel, defense in dict.fromkeys((r["panel"], r["defense"]) for r in own(rows)):
            mine = [r for r in own(rows) if (r["panel"], r["defense"]) == (panel, defense)]
            change = interval([r["change"] for r in mine])
            live = sum(r["live"] for r in mine)
            table.append(
                {
                    "panel": panel,
                    "defense": defense,
                    "paper's range": paper_range(panel, defense),
                    "zeroed, last layer": _share(mine, "zeroed_layer"),
                    "zeroed, all": _share(mine, "zeroed"),
                    "live entries of r taken": f"{sum(r['taken'] for r in mine) / live:.0%}" if live else "-",
                    "change": f"{change.mean:.3g} [{change.low:.3g}, {change.high:.3g}]",
                }
            )
        return table

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw how much of an update every level changes, mean and range over images."""
        panels: dict[str, list[Dot]] = {}
        for panel, defense in dict.fromkeys((r["panel"], r["defense"]) for r in own(rows)):
            values = [r["change"] for r in own(rows) if (r["panel"], r["defense"]) == (panel, defense)]
            if max(values) > 0:
                panels.setdefault(panel, []).append(Dot.of(defense, values, defense.partition(":")[0]))
        dot_panels(path, panels, "||defended - plain|| / ||plain||", log=True)
        return True

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge whether the levels lie in the paper's ranges and reach their upper ends."""
        verdicts = []
        for line, (name, factor) in NAMES.items():
            for attack, (low, high) in published()["table2"]["rows"][line].items():
                run = sorted(factor * _level(d) for d in FULL[attack] if d.startswith(name))
                inside = run[0] >= low * (1 - 1e-9) and abs(run[-1] - high) <= 1e-9 * high
                verdicts.append(
                    Judgement(
                        f"{line}, {attack.upper()}: the levels run are the paper's",
                        "reproduced" if inside else "not reproduced",
                        "all levels within the paper's range, the highest at its upper end",
                        f"{low:g} to {high:g}",
                        ", ".join(f"{v:g}" for v in run),
                    )
                )
        return verdicts


def paper_range(panel: str, defense: str) -> str:
    """Return the paper's range for a defence on a panel, as text."""
    for line, (name, _) in NAMES.items():
        if defense.partition(":")[0] == name:
            low, high = published()["table2"]["rows"][line][panel.partition("-")[0]]
            return f"{low:g} to {high:g}{' %' if '%' in line else ''}"
    return "-"


def _level(defense: str) -> float:
    return float(defense.partition("=")[2])


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


def _share(rows: Sequence[Row], key: str) -> str:
    return f"{interval([r[key] for r in rows]).mean:.1%}"
