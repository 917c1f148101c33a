"""What a server gets of the clients that exist: networks of today, real local training, and no defence.

Fixed before any result was seen: a client holds 1, 8 or 32 images of the training split, the same for every network and
schedule. It takes one step on all of them (learning rate 0.01), or trains for 2 epochs of batches of 8 with momentum
0.9 (0.01) or with Adam (0.001), batch norm in train mode. Its weights are freshly drawn, or trained on the whole
training split. Every attack on every client has the same seconds. There is no defence, so each row is a control: where
the attacks fail, it says nothing of what a defence adds, and is called *uninformative*.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gradveil import pace, tree
from gradveil.attacks.base import LARGE
from gradveil.attacks.base import build as build_attack
from gradveil.data.base import Dataset
from gradveil.errors import UpdateError
from gradveil.federated.client import evaluate
from gradveil.federated.server import Checkpoint
from gradveil.federated.settings import Local, Training
from gradveil.federated.simulate import simulate
from gradveil.metrics import short
from gradveil.protection.defense import build as build_defense
from gradveil.ranges import Count, Positive
from gradveil.registry import Spec, parse
from gradveil.threats.panel import oblivious
from gradveil.threats.rows import OBLIVIOUS, Floor, Line, MeasuredExample, best_floor, group, lines, read, why_it_failed
from gradveil.threats.setup import fitting_model, is_small, load_dataset, one_thread
from gradveil.threats.trial import Public, Result, Trial, attempt, client_row, floors, measured, observe
from gradveil.threats.verdict import strongest
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, finite, in_all, judge
from gradveil_studies.paper.figures import Dot, dot_panels
from gradveil_studies.paper.rows import family

EXAMPLES = (1, 8, 32)
ONE_STEP, MOMENTUM, ADAM = "step", "momentum", "adam"
SCHEDULES = {  # the learning rate and the local training
    ONE_STEP: (0.01, Local(batch_size=None)),
    MOMENTUM: (0.01, Local(epochs=2, batch_size=8, momentum=0.9)),
    ADAM: (0.001, Local(epochs=2, batch_size=8, optimizer="adam")),
}
UNTRAINED, TRAINED = "untrained", "trained"
TRY, TRY_STEPS, RANK = 1.0, 3, 512  # seconds and steps that tell an attack's speed; directions of the server's prior


def own_mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a user's own network: one hidden layer of 128 units, ReLU."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), 128), nn.ReLU(), nn.Linear(128, num_classes)
    )  # fmt: skip


OWN = f"{__name__}:own_mlp"
FULL = {"lenet": "lenet", "resnet18": "resnet18", "vit_tiny": "vit_tiny", "mlp": OWN}
SMALL = {"lenet": "lenet:strides=2/1,width=4", "resnet18": "resnet18:width=2"}
QUICK = SMALL | {"vit_tiny": "vit_tiny:depth=1,width=8,heads=2", "mlp": OWN}


@dataclass(frozen=True)
class ClientCell:
    """One kind of client: its network, how many examples it has, how it trains, and on which weights."""

    network: str
    examples: int
    schedule: str
    weights: str

    @property
    def name(self) -> str:
        return f"{self.network}/{self.examples}/{self.schedule}/{self.weights}"

    @property
    def setting(self) -> str:
        """*deployment*: trained weights and local training of several steps; all else is a *diagnostic*."""
        return "deployment" if self.weights == TRAINED and self.schedule != ONE_STEP else "diagnostic"


def all_cells(networks: tuple[str, ...] = tuple(FULL)) -> list[ClientCell]:
    """Return the whole table."""
    weights = (UNTRAINED, TRAINED)
    return [ClientCell(n, e, s, w) for w in weights for n in networks for e in EXAMPLES for s in SCHEDULES]


@dataclass(frozen=True)
class Amount:
    """How much of everything: of the data, of training, of the attacks."""

    dataset: str
    networks: tuple[tuple[str, str], ...]  # name and spec
    epochs: int  # of training, until weights count as trained
    steps: tuple[tuple[str, int], ...] = ()  # of attacks, where they are not their own
    alone: int = 2  # attacked clients that hold one example; of those that hold more there is one
    seconds: float = math.inf  # for each attack on each client; twice that on networks beyond ``LARGE``


FEW_STEPS = (("dlg", 1), ("gs", 20), ("fedavg", 5), ("surrogate", 10), ("newton", 2))


def amount(context: Context, seconds: float, epochs: int) -> Amount:
    """Return how much a scale asks for."""
    if context.full:
        return Amount("cifar10", tuple(FULL.items()), epochs, seconds=seconds)
    return Amount("digits", tuple(QUICK.items()), 1, FEW_STEPS, alone=1)


@dataclass(frozen=True)
class Stage:
    """What all clients of a run share: the data, and what the server knows of its kind."""

    dataset: Dataset
    truth: Batch  # the most examples that a client has
    public: Public


@lru_cache(maxsize=1)  # the prior is slow to fit
def stage(dataset: str, context: Context) -> Stage:
    """Return what all clients share."""
    data = load_dataset(dataset, context.data)
    public = Public.draw(data, context.seeds("public"), rank=None)
    prior = GaussianPrior.fit(public.batch.inputs.to(context.device), rank=RANK)
    truth = data.train.sample(max(EXAMPLES), context.seeds("images"))
    return Stage(data, truth, replace(public, prior=prior))


@lru_cache(maxsize=8)
def network(name: str, weights: str, much: Amount, context: Context) -> tuple[nn.Module, float]:
    """Return a network in train mode, as clients run it, and its accuracy; trained once for a run."""
    data = stage(much.dataset, context).dataset
    model = fitting_model(dict(much.networks)[name], data, "cross_entropy", context.seeds.number("weights", name))
    model = model.train().to(context.device)
    if weights == TRAINED:
        kept = None if context.out is None else context.out / "clients" / f"{name}.safetensors"
        if kept is not None and kept.exists():
            Checkpoint.read(kept).restore(model)
        else:
            model = _trained(model, data, much, context)
            if kept is not None:
                Checkpoint(much.epochs, dict(model.state_dict()), {}, {}).save(kept)
    return model, evaluate(model, data.test).accuracy


def _trained(model: nn.Module, data: Dataset, much: Amount, context: Context) -> nn.Module:
    """Train on the whole training split at one place: Adam, batches of 128."""
    rule = Training(rounds=much.epochs, clients=1, batch_size=128, optimizer="adam", lr=0.001)
    everything = [np.arange(len(data.train))]
    rounds = list(simulate(model, data, everything, rule, seeds=context.seeds))
    return copy.deepcopy(rounds[-1].model).train()


def attacks_on(cell: ClientCell, model: nn.Module, much: Amount, device: torch.device) -> list[str]:
    """Return who attacks: for one step DLG and GS, for several what unrolls them, what does not, and GS.

    Beside them Gauss-Newton where one example is looked for and the network is small, and the quotient of a first
    layer that is fully connected.
    """
    several = ("fedavg", "surrogate", "gs")
    named = ["dlg:restarts=2", "gs"] if cell.schedule == ONE_STEP else list(several)
    if device.type == "cuda":
        named = ["gs:tf32=true" if spec == "gs" else spec for spec in named]
    if cell.examples == 1 and tree.size(tree.parameters(model)) <= LARGE:
        named.insert(0, "newton")
    if cell.network == "mlp":
        named.insert(0, "analytic")
    steps = dict(much.steps)
    return [with_steps(spec, steps[family(spec)]) if family(spec) in steps else spec for spec in named]


def with_steps(spec: str, steps: int) -> str:
    """Return an attack that takes so many steps."""
    parsed = parse(spec)
    return str(Spec(parsed.name, {**parsed.settings, "steps": str(steps)}))


def cell_rows(cell: ClientCell, much: Amount, context: Context) -> list[Row]:
    """Attack every client of a cell: a row for each client, and one for each attack on it."""
    model, accuracy = network(cell.network, cell.weights, much, context)
    shared = stage(much.dataset, context)
    rows: list[Row] = []
    with one_thread(context.device.type == "cpu" and is_small(model)):
        for i in range(much.alone if cell.examples == 1 else 1):
            truth = shared.truth[i * cell.examples : (i + 1) * cell.examples]
            client = AttackedClient(cell, i, model, truth, shared, context)
            rows += [row | {"client": i} for row in client.rows(accuracy, much)]
    return [{"network": cell.network, "examples": cell.examples, "schedule": cell.schedule, "weights": cell.weights}
            | row for row in rows]  # fmt: skip


@dataclass(frozen=True)
class AttackedClient:
    """One client of a cell, and what is done to its update."""

    cell: ClientCell
    number: int
    model: nn.Module
    truth: Batch
    shared: Stage
    context: Context

    def rows(self, accuracy: float, much: Amount) -> list[Row]:
        """Return what the client is and what blind guesses come to, then a row for each attack."""
        seen = self.sent(self.truth, "client")
        guesses, _ = floors(self.truth, self.shared.public)
        blind = {g: _short(r["mse"] for r in guesses if r["guess"] == g) for g in {r["guess"]: 0 for r in guesses}}
        said = client_row(seen.update)["schedule"]
        client: Row = {"kind": "client", "schedule_said": said, "accuracy": accuracy, "floors": blind}
        twice = 2 if tree.size(tree.parameters(self.model)) > LARGE else 1
        chosen = attacks_on(self.cell, self.model, much, self.context.device)
        return [client, *(self.attacked(attack, seen, twice * much.seconds) for attack in chosen)]

    def sent(self, batch: Batch, *purpose: str | int) -> Observation:
        """Return what the server sees if a client with these examples trains as this one does."""
        lr, local = SCHEDULES[self.cell.schedule]
        rng = self.context.seeds(*purpose, self.cell.examples, self.cell.schedule, self.number)
        known = self.shared
        return observe(
            self.model, batch.to(self.context.device), build_defense("none"), rng, known.dataset.num_classes,
            known.public.prior, lr, local=local,
        )  # fmt: skip

    def attacked(self, attack: str, seen: Observation, seconds: float) -> Row:
        name = family(attack)

        def trial(spec: str) -> Trial:
            rng = self.context.seeds("attack", name, self.cell.name, self.number)
            return Trial(seen, oblivious(), spec, rng, self.truth)

        began = pace.clock()
        result, spec = in_time(trial, attack, seconds)
        row: Row = {"attack": name, "spec": spec, "took": round(pace.clock() - began, 2)}
        if not isinstance(result, Reconstruction):
            return {"kind": "skip", "why": str(result)} | row
        values, _ = measured(result, self.truth, self.shared.public.gallery)
        late = "out_of_time" in result.details
        row |= {name: _short(values[name].tolist()) for name in ("mse", "identified", "label")}
        row |= {"gallery": self.shared.public.choices, "converged": result.converged, "out_of_time": late}
        return {"kind": "attack"} | row | {"objective": result.objective, "mismatch": self.mismatch(seen, result)}

    def mismatch(self, seen: Observation, found: Reconstruction) -> float | None:
        """Return how far from the update that came is the one that a client with the images found would send.

        The cosine distance: what a server can say of any attack's answer, without the truth. None: nothing to compare.
        """
        if found.labels is None:
            return None
        try:
            again = self.sent(Batch(found.inputs, found.labels), "again").update.gradient
        except UpdateError:
            return None
        came = seen.update.gradient
        return finite(1 - tree.dot(again, came) / (tree.norm(again) * tree.norm(came)))


def in_time(trial: Callable[[str], Trial], attack: str, seconds: float) -> tuple[Result, str]:
    """Run an attack in so many seconds; return what it found, and the attack as it was run.

    Where its own number of steps would take longer, by its speed in the first moment, it is given as many as fit, so
    that a schedule of step sizes comes to its end. What does not converge then is out of time.
    """
    own, fitted = getattr(build_attack(attack), "steps", 0), attack
    if seconds < math.inf and own and family(attack) != "newton":  # whose stages are not a number of steps
        with pace.Limit(min(TRY, seconds), least=TRY_STEPS) as limit:
            attempt([trial(attack)])
        if limit.whole > seconds:
            fitted = with_steps(attack, max(1, int(own * seconds / limit.whole)))
    with pace.Limit(seconds):
        (result,) = attempt([trial(fitted)])
    if isinstance(result, Reconstruction) and fitted != attack and not result.converged:
        result = replace(result, details=result.details | {"out_of_time": 1.0})
    return result, fitted


def _short(values: Any) -> list[float | None]:
    """Return numbers with four digits: what is not known is None."""
    kept = [float(v) if isinstance(v, Tensor) else v for v in values]
    return [None if math.isnan(v) else float(f"{v:.4g}") for v in kept]


TRAINING = "train"  # the first word of the units that train
SAID = {ONE_STEP: "one step", MOMENTUM: "2 epochs, momentum", ADAM: "2 epochs, Adam"}
LOOK = {UNTRAINED: {"color": "#0072B2", "marker": "o"}, TRAINED: {"color": "#D55E00", "marker": "s"}}
GOT, LEAST = ("recovered", "recognised"), 1e-3  # a smaller share of the blind guess's error is drawn there


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
        found = best_floor(self.examples)
        assert found is not None  # every client has its guesses
        return found

    @cached_property
    def lines(self) -> list[Line]:
        return lines(self.examples)

    @property
    def best(self) -> Line | None:
        return strongest(self.lines)

    def images(self, attack: str) -> list[MeasuredExample]:
        return [m for m in read(self.examples, "attack") if m.attack == attack]

    @property
    def ratios(self) -> list[float]:
        """The strongest attack's error on each image over that of the blind guess."""
        if self.best is None:
            return []
        return [m.mse / self.floor.by_example[m.example] for m in self.images(self.best.attack)]

    @property
    def outcome(self) -> str:
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
        return float(next(row["accuracy"] for row in self.rows if row["kind"] == "client"))

    @property
    def seconds(self) -> float:
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
