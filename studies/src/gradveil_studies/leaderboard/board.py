"""The leaderboard as units of work: trainings, attacks and times, each kept when it is done."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from gradveil_studies.leaderboard.attacked import Place
from gradveil_studies.leaderboard.attacks import attacked, floor_rows, timed
from gradveil_studies.leaderboard.entries import BATCHES, ENTRIES, PANELS, Entry, Panel
from gradveil_studies.leaderboard.standings import Standing, standings, table
from gradveil_studies.leaderboard.training import trained
from gradveil_studies.paper.base import Context, Item, Judgement, Row
from gradveil_studies.paper.figures import LOOKS, figure
from gradveil_studies.paper.rows import family

Kind = Literal["floors", "train", "attack", "time"]
TOGETHER = {"train": 8, "attack": 6}  # entries that run at once on CUDA
BELOW = "no attack gets below a certificate beyond chance"
DECLARED = "what a defence declares is so"
MORE_LOOKS = ("#56B4E9", "#999933", "#882255", "#44AA99", "#661100", "#6699CC", "#888888", "#DDCC77")


@dataclass(frozen=True)
class Unit:
    """One unit of work."""

    kind: Kind
    panel: Panel
    entry: Entry
    split: str = ""


@dataclass(frozen=True)
class Leaderboard(Item):
    """Every defence under its strongest server, over the whole run."""

    spec_name: ClassVar[str] = "leaderboard"
    title = "Every defence under its strongest server, over the whole run"

    defenses: tuple[str, ...] = ()  # in place of the entries; the undefended is always there

    @property
    def entries(self) -> tuple[Entry, ...]:
        return (ENTRIES[0], *(Entry(spec) for spec in self.defenses if spec != "none")) if self.defenses else ENTRIES

    def work(self, context: Context) -> dict[str, Unit]:
        """Return floors, trainings, attacks and times, data set by data set."""
        found: dict[str, Unit] = {}
        for panel in PANELS[context.scale]:
            found[f"floors/{panel.dataset}"] = Unit("floors", panel, ENTRIES[0])
            first, *rest = panel.splits
            found |= self._trainings(panel, first)
            for kind in ("attack", "time"):
                found |= {f"{kind}/{panel.dataset}/{e.name}": Unit(kind, panel, e) for e in self.entries}
            for split in rest:
                found |= self._trainings(panel, split)
        return found

    def _trainings(self, panel: Panel, split: str) -> dict[str, Unit]:
        return {
            f"train/{panel.dataset}/{split}/{e.name}": Unit("train", panel, e, split) for e in (*self.entries, BATCHES)
        }

    def run(self, unit: str, context: Context) -> list[Row]:
        return self.run_group([unit], context)[unit]

    def groups(self, units: Sequence[str], context: Context) -> list[list[str]]:
        """Return, on CUDA, trainings and attacks of one data set together, some at a time; all else alone."""
        if context.device.type != "cuda":
            return super().groups(units, context)
        work = self.work(context)
        groups: list[list[str]] = []
        for unit in units:
            mine, last = work[unit], work[groups[-1][0]] if groups else None
            alike = last is not None and (last.kind, last.panel, last.split) == (mine.kind, mine.panel, mine.split)
            if alike and len(groups[-1]) < TOGETHER.get(mine.kind, 1):
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return groups

    def run_group(self, units: Sequence[str], context: Context) -> dict[str, list[Row]]:
        """Do the units of one group: all of one kind, data set and split."""
        work = self.work(context)
        mine = {unit: work[unit] for unit in units}
        one = mine[units[0]]
        entries = [w.entry for w in mine.values()]
        if one.kind == "train":
            rows = trained(entries, one.panel, one.split, context)
        else:
            place = _place(one.panel, context)
            if one.kind == "floors":
                return {units[0]: floor_rows(place)}
            rows = attacked(entries, place) if one.kind == "attack" else {e: timed(e, place) for e in entries}
        return {unit: rows[w.entry] for unit, w in mine.items()}

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        return table(standings(rows))

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Return the attacks that got below a certificate, and declarations that are not so: errors, both."""
        found = [
            (one, rule, said)
            for one in standings(rows)
            for rule, some in ((BELOW, one.beaten), (DECLARED, one.errors))
            for said in some
        ]
        return [Judgement(f"{one.defense} on {one.dataset}", "error", rule, "-", said) for one, rule, said in found]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw what a defence costs against what its strongest server gets."""
        found = standings(rows)
        panels = list(dict.fromkeys((one.dataset, split) for one in found if one.got for split in one.costs))
        if not panels:
            return False
        names = {"error of the strongest server / blind guess": _error, "picked of 100 candidates": _picked}
        looks = _looks(found)
        with figure(path, 4.2 * len(panels), 7.2) as empty:
            axes = empty.subplots(2, len(panels), squeeze=False)
            for row, (name, value) in enumerate(names.items()):
                for axis, (dataset, split) in zip(axes[row], panels, strict=True):
                    axis.set_title(f"{dataset}, {split} split")
                    axis.set_xlabel(name)
                    axis.set_ylabel("accuracy")
                    axis.grid(linewidth=0.3)
                    for one in found:
                        cost, at = one.costs.get(split), value(one)
                        if one.dataset == dataset and cost is not None and at is not None:
                            _point(axis, looks[family(one.defense)], at, cost.accuracy)
            handles = {
                label: handle
                for axis in axes.flatten()
                for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
            }
            if handles:
                columns = 2 * len(panels)
                empty.legend(
                    handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8
                )
        return True


def _error(one: Standing) -> Any:
    return None if one.strongest is None else one.strongest.error


def _picked(one: Standing) -> Any:
    return None if one.identified is None else one.identified.line.identified


def _point(axis: Any, look: dict[str, Any], x: Any, y: Any) -> None:
    reach = [[[max(v.mean - v.low, 0.0)], [max(v.high - v.mean, 0.0)]] for v in (x, y)]
    axis.errorbar([x.mean], [y.mean], xerr=reach[0], yerr=reach[1], linestyle="none", markersize=5, elinewidth=0.5,
                  **look)  # fmt: skip


def _looks(found: Sequence[Standing]) -> dict[str, dict[str, Any]]:
    """Return how each family is drawn; all others than those of the paper in colours of their own."""
    names = list(dict.fromkeys(family(one.defense) for one in found))
    own = [name for name in names if name not in LOOKS]
    more = {
        name: {"color": MORE_LOOKS[i % len(MORE_LOOKS)], "marker": "DPp<>hd8"[i % 8], "label": name}
        for i, name in enumerate(own)
    }
    return {name: LOOKS.get(name) or more[name] for name in names}


@lru_cache(maxsize=2)
def _place(panel: Panel, context: Context) -> Place:
    """Return what is attacked on a panel: units that follow one another share it."""
    return Place(panel, context)
