"""What a server gets of the clients that exist: networks of today, real local training, and no defence.

Fixed before any result was seen: a client holds 1, 8 or 32 images of the training split, the same for every network and
schedule. It takes one step on all of them (learning rate 0.01), or trains for 2 epochs of batches of 8 with momentum
0.9 (0.01) or with Adam (0.001), batch norm in train mode. Its weights are freshly drawn, or trained on the whole
training split. Every attack on every client has the same seconds. There is no defence, so each row is a control: where
the attacks fail, it says nothing of what a defence adds, and is called *uninformative*.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from gradveil.metrics.recovery import short
from gradveil.ranges import Count, Positive
from gradveil.threats.rows import (
    OBLIVIOUS,
    Floor,
    Line,
    MeasuredExample,
    best_floor,
    group,
    lines,
    read,
    why_it_failed,
)
from gradveil.threats.verdict import strongest
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, in_all, judge
from gradveil_studies.paper.client_runs import (
    ADAM,
    MOMENTUM,
    ONE_STEP,
    TRAINED,
    UNTRAINED,
    Amount,
    ClientCell,
    all_cells,
    amount,
    cell_rows,
    network,
)
from gradveil_studies.paper.figures import Dot, dot_panels

TRAINING = "train"  # the first word of the units that train
SAID = {ONE_STEP: "one step", MOMENTUM: "2 epochs, momentum", ADAM: "2 epochs, Adam"}
LOOK = {
    UNTRAINED: {"color": "#0072B2", "marker": "o"},
    TRAINED: {"color": "#D55E00", "marker": "s"},
}
GOT = ("recovered", "recognised")
LEAST = 1e-3  # a smaller share of the blind guess's error is drawn here


@ITEMS.register("clients")
@dataclass(frozen=True)
class Clients(Item):
    """Undefended clients of four networks: how many examples, which local training, which weights."""

    title = "What a server gets of undefended clients, by network, local training and weights (CIFAR-10)"
    notes: ClassVar[tuple[str, ...]] = (
        "Not in the paper: the clients that exist, beside the laboratory's. There is no defence, so every line is a "
        "control. *control* is the MSE of the strongest attack, *floor* that of the best blind guess.",
        "Verdicts are the audit's: *recovered*, at least half of the images with under a tenth of the floor; "
        "*recognised*, at least half told from 99 others; *traces*, more than chance explains, or under half of the "
        "floor; *uninformative*: none of these, so that a defence cannot be judged there, with the reason for each "
        "attack.",
        "*deployment*: trained weights, batch norm in train mode, local training of several steps. All else is a "
        "*diagnostic*: untrained weights or one step on all examples.",
        "LeNet is the paper's (sigmoid); the MLP is a user's own, given as module:function: one hidden layer of 128 "
        "units. *trained*: Adam (0.001), batches of 128 of the whole training split, whose accuracy stands beside it; "
        "the attacked images are among it.",
        "Labels are read off the update, not given. Images are the same for all networks and schedules; clients with "
        "1 example are two, with 8 and 32 one each: of two images one is half, which is what *recognised* asks for, so "
        "look at the counts.",
        "One step: DLG (two starts) and GS; several: `fedavg`, which unrolls them, `surrogate`, which does not, and GS "
        "on the mean gradient; beside them `newton` for 1 example on up to 500,000 weights and `analytic` on the MLP. "
        "`–`: the attack refuses this update. ResNet-18's clients send the running statistics of batch norm as well, "
        "which GS, `fedavg` and `surrogate` use.",
        "Every attack has 10 seconds for a client (20 on ResNet-18), and where its own steps would take longer, as "
        "many as fit: then it is *out of time* unless it converges, and more time may get more. *seconds*: of all "
        "attacks on a client. Other work ran beside them, ten processes on the H200: by itself an attack takes less or "
        "gets more.",
        "*server picks*: the attack whose images, put through the client's training, come nearest to its update: "
        "objectives of different attacks cannot be compared, this can, and needs no truth.",
    )

    seconds: Positive = 10.0  # for each attack on each client; twice that on large networks
    epochs: Count = 5  # until weights count as trained

    def work(self, context: Context) -> dict[str, str | ClientCell]:
        """Return the networks to train, then the cells; quick: every network once, and two that are trained."""
        cells = all_cells()
        if not context.full:
            wanted = {f"{n}/1/{ONE_STEP}/{UNTRAINED}" for n, _ in self._amount(context).networks}
            wanted |= {f"lenet/8/{ADAM}/{TRAINED}", f"mlp/8/{MOMENTUM}/{TRAINED}"}
            cells = [cell for cell in cells if cell.name in wanted]
        trained = dict.fromkeys(cell.network for cell in cells if cell.weights == TRAINED)
        return {f"{TRAINING}/{name}": name for name in trained} | {cell.name: cell for cell in cells}

    def _amount(self, context: Context) -> Amount:
        return amount(context, self.seconds, self.epochs)

    def run(self, unit: str, context: Context) -> list[Row]:
        """Train one network, or attack the clients of one cell."""
        what, much = self.work(context)[unit], self._amount(context)
        if isinstance(what, ClientCell):
            return cell_rows(what, much, context)
        accuracy = network(what, TRAINED, much, context)[1]
        return [{"kind": "accuracy", "network": what, "epochs": much.epochs, "accuracy": accuracy}]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return one line for each kind of client."""
        return [_table_line(found) for found in by_cell(rows)]

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge what is said of such clients: laboratory settings give images away, networks of today do not."""
        found = by_cell(rows)
        small = {f.cell.network: f for f in found if f.cell == ClientCell(f.cell.network, 1, ONE_STEP, UNTRAINED)}
        today = [f for f in found if f.cell.network in ("resnet18", "vit_tiny") and f.cell.setting == "deployment"]
        open_ = [f.cell.name for f in today if f.outcome in GOT]
        told = ", ".join(f"{name}: {f.outcome}" for name, f in small.items())
        kept = f"{len(open_)} of {len(today)} gave images away" + (f" ({', '.join(open_)})" if open_ else "")
        return [
            judge(
                "One untrained step on one example gives the image away",
                in_all({name: f.outcome in GOT for name, f in small.items()}, "on"),
                "recovered or recognised by the strongest attack",
                "not in the paper",
                told,
            ),
            judge(
                "ResNet-18 and ViT in deployment resist these attacks in this time",
                not open_ if today else None,
                "in no deployment line of the two the verdict is recovered or recognised",
                "not in the paper",
                kept,
            ),
        ]

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw the strongest attack's error over that of the blind guess, image by image, a panel a network."""
        panels: dict[str, list[Dot]] = {}
        for found in by_cell(rows):
            label = f"{found.cell.examples} · {SAID[found.cell.schedule]} · {found.cell.weights}"
            dots = panels.setdefault(found.cell.network, [])
            if ratios := found.ratios:
                dots.append(Dot.of(label, [max(r, LEAST) for r in ratios], LOOK[found.cell.weights]))
        edges = {"as good as the best blind guess": 1.0, "recovered": 0.1}
        dot_panels(
            path, panels, "error / blind guess (mean, range)", log=True,
            lines=dict.fromkeys(panels, edges), columns=2,
        )  # fmt: skip
        return True


@dataclass(frozen=True)
class FoundCell:
    """All rows of one kind of client."""

    cell: ClientCell
    rows: tuple[Row, ...]

    @cached_property
    def examples(self) -> list[Row]:
        """A row for every image that was attacked or guessed, as the audit has them."""
        found: list[Row] = []
        for row in self.rows:
            first = row["client"] * self.cell.examples
            if row["kind"] == "client":
                found += [{"kind": "floor", "guess": guess, "example": first + i, "mse": mse}
                          for guess, values in row["floors"].items() for i, mse in enumerate(values)]  # fmt: skip
            if row["kind"] == "attack":
                said = {name: row[name] for name in ("kind", "attack", "converged", "gallery", "weights")}
                said |= {"defense": "none", "server": OBLIVIOUS, "round": "first"}
                said |= {"details": {"out_of_time": 1.0} if row["out_of_time"] else {}}
                each = zip(row["mse"], row["identified"], row["label"], strict=True)
                found += [said | {"example": first + i, "mse": mse, "identified": told, "label": label}
                          for i, (mse, told, label) in enumerate(each)]  # fmt: skip
        return found

    @cached_property
    def floor(self) -> Floor:
        """The best blind guess."""
        found = best_floor(self.examples)
        assert found is not None  # every client has its guesses
        return found

    @cached_property
    def lines(self) -> list[Line]:
        """Every attack that ran."""
        return lines(self.examples)

    @property
    def best(self) -> Line | None:
        """The attack that got most."""
        return strongest(self.lines)

    def images(self, attack: str) -> list[MeasuredExample]:
        """What one attack made of each image."""
        return [m for m in read(self.examples, "attack") if m.attack == attack]

    @property
    def ratios(self) -> list[float]:
        """The strongest attack's error on each image over that of the blind guess."""
        if self.best is None:
            return []
        return [m.mse / self.floor.by_example[m.example] for m in self.images(self.best.attack)]

    @property
    def outcome(self) -> str:
        """The verdict in one word."""
        return "uninformative" if self.best is None or self.best.grade == "nothing" else self.best.grade

    @property
    def verdict(self) -> str:
        """The verdict; where no attack got anything, why each failed."""
        if self.outcome != "uninformative":
            return f"**{self.outcome}**" if self.outcome in GOT else self.outcome
        why = "; ".join(f"{line.attack} {why_it_failed(self.images(line.attack))}" for line in self.lines)
        return f"uninformative ({why or 'every attack refuses'})"

    @property
    def picked(self) -> str:
        """The attack whose images send nearly what came; empty where none can be told."""
        tried = group((row for row in self.rows if row["kind"] == "attack"), "attack")
        known = {a: [row["mismatch"] for row in mine] for (a,), mine in tried.items()}
        means = {a: fmean(values) for a, values in known.items() if None not in values}
        return min(means, key=lambda a: means[a], default="")

    @property
    def accuracy(self) -> float:
        """Of the weights that the clients received."""
        return float(next(row["accuracy"] for row in self.rows if row["kind"] == "client"))

    @property
    def seconds(self) -> float:
        """What all attacks on one client took, on average."""
        clients = len({row["client"] for row in self.rows})
        return float(sum(row.get("took", 0.0) for row in self.rows)) / clients


def by_cell(rows: Sequence[Row]) -> list[FoundCell]:
    """Return the cells of the rows, those that belong together beside each other."""
    mine = [row for row in rows if row["kind"] != "accuracy"]
    cells = group(mine, "network", "examples", "schedule", "weights")
    found = [FoundCell(ClientCell(*key), tuple(own)) for key, own in cells.items()]
    place = [cell.name for cell in sorted(all_cells(), key=lambda c: list(SAID).index(c.schedule))]
    names = list(dict.fromkeys(cell.network for cell in all_cells()))
    return sorted(found, key=lambda f: (names.index(f.cell.network), f.cell.examples, place.index(f.cell.name)))


def _table_line(found: FoundCell) -> Row:
    cell, best = found.cell, found.best
    trained = f"{cell.weights} ({found.accuracy:.0%})" if cell.weights == TRAINED else cell.weights
    line: dict[str, Any] = {"network": cell.network, "examples": cell.examples, "local training": SAID[cell.schedule]}
    line |= {"weights": trained, "setting": cell.setting}
    line |= {"control": "–" if best is None else short(best.mse.mean), "floor": short(found.floor.mse.mean)}
    told = "–" if best is None else f"{best.identified.hits} of {best.identified.count}"
    labels = "–" if best is None or not best.label.count else f"{best.label.hits} of {best.label.count}"
    line |= {"told apart": told, "labels": labels, "verdict": found.verdict}
    line |= {"strongest": "–" if best is None else best.attack, "server picks": found.picked or "–"}
    errors = {one.attack: short(one.mse.mean) for one in found.lines}
    tried = dict.fromkeys(row["attack"] for row in found.rows if "attack" in row)
    return line | {
        "MSE by attack": ", ".join(f"{name} {errors.get(name, '–')}" for name in tried),
        "seconds": f"{found.seconds:.0f}",
    }
