"""Table 1: how well class-wise representations are inferred from updates, with the controls the table lacks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.federated.engines import World
from gradveil.federated.settings import Training
from gradveil.federated.simulate import Round, choose, simulate
from gradveil.models import build
from gradveil.protection.defense import NoDefense
from gradveil.ranges import Count, Positive
from gradveil.seeds import Seeds
from gradveil.threats.rows import group
from gradveil_studies.paper.base import ITEMS, Context, Item, Judgement, Row, judge, published
from gradveil_studies.paper.figures import PAPER, PROMISED, REACHED, SOUND, Dot, dot_panels
from gradveil_studies.paper.inference import RULES, InferenceSettings, Inferred, LayerChain, chain_of, infer_stacked
from gradveil_studies.paper.representations import (
    CONTROLS,
    class_means,
    class_set_accuracy,
    correlation,
    representation_scores,
)
from gradveil_studies.paper.rows import Record, spread

LOOKS = {"own": PROMISED, "wrong": SOUND, "blind": REACHED}
BLIND = 500  # public images whose mean representation is the blind guess
DENSE = ("fc1", "fc2", "fc3")
CLASSES = "classes"  # in place of a layer, in the row of the class sets
NEAR = 0.05  # of the paper's cor
FIRST = "E=1, B=32"  # the table's first row, judged layer by layer


@dataclass(frozen=True)
class InferenceRun:
    """One line of the table with one of the seeds."""

    setting: str
    seed: int

    @property
    def split(self) -> str:
        return (
            "iid:devices=100,per_device=40" if "IID" in self.setting else "classes:devices=100,classes=2,per_class=20"
        )

    def training(self, rounds: int) -> Training:
        epochs, batch_size = (int(n) for n in re.findall(r"=(\d+)", self.setting))
        return Training(rounds=rounds, clients=10, epochs=epochs, batch_size=batch_size, lr=0.01)


@dataclass(frozen=True)
class InferredRow(Record):
    """What was inferred at one layer, means over the rounds; or, in place of a layer, the class sets."""

    setting: str
    layer: str
    own: float = nan  # cor with the own class, and the controls
    wrong: float = nan
    nearest: float = nan
    centred: float = nan
    blind: float = nan
    gap: float = nan  # share of the updates whose exact classes each rule reads off
    mean: float = nan
    bias_sign: float = nan
    row_sum: float = nan


@ITEMS.register("table1")
@dataclass(frozen=True)
class Table1(Item):
    """Correlation of inferred and true class-wise representations while federated averaging runs.

    100 devices x 2 classes x 20 examples, 10 devices a round, lr 0.01, CIFAR-10, leaknet on inputs (x - 0.5) / 0.5. The
    true representation is the class mean of the layer's input under the round's start weights; the update is the
    whole round's. Beside the paper's ``cor`` (own): the same with the other classes on the device (wrong), whether
    the own class is nearest, the centred correlation, and the correlation of a blind guess, the mean
    representation of public images of all classes, which needs no update at all.
    """

    title = "Table 1: class-wise representations inferred from updates (leaknet, CIFAR-10), with controls"
    notes = (
        "The paper gives neither activation nor padding: ReLU, no padding (400 inputs to FC1), PyTorch's default "
        "initialisation, inputs (x - 0.5) / 0.5, lr 0.01.",
        "The update is the whole round's W_before - W_after; the true representation is the class mean of the layer's "
        "input (after the activation) under the weights that the round started with.",
        "M is not given: half of the rows are summed per class, with their signs aligned; a plain sum gives a similar "
        "|cor| of random sign.",
        "The columns wrong, nearest, centred and blind are controls that the paper does not have.",
        "No single reading of the algorithm gives the whole published table.",
    )

    model: str = "leaknet:normalize=half"
    dataset: str = "cifar10"
    m: Positive = 0.5  # rows per class: the paper's M, as a share
    seeds: Count = 3
    rounds: Count = 200  # quick: a tenth
    engine: str | None = None  # None: stacked clients on CUDA; on a CPU worker processes where the run is long enough

    def work(self, context: Context) -> dict[str, InferenceRun]:
        """Return setting/seed for the paper's six rows; quick: one seed and fewer rounds."""
        seeds = range(self.seeds if context.full else 1)
        return {f"{s}/{seed}": InferenceRun(s, seed) for seed in seeds for s in published()["table1"]["rows"]}

    def run(self, unit: str, context: Context) -> list[Row]:
        """Train in one setting and infer in every round; one row per layer, and one for the class sets."""
        run = self.work(context)[unit]
        dataset = load(self.dataset, context.data)
        seeds = Seeds(context.seeds.number("table1", run.seed))
        clients = partition(dataset.train.labels, run.split, seeds.numpy("split"))
        model = build(self.model, dataset.input_shape, dataset.num_classes, seed=seeds.number("weights"))
        model = model.to(context.device)
        public = dataset.test.sample(BLIND, seeds("public")).inputs
        rounds = self.rounds if context.full else max(self.rounds // 10, 1)
        training = run.training(rounds)
        chain = chain_of(model, dataset.input_shape, dataset.num_classes)
        watcher = _Watcher(chain, dataset.num_classes, public.to(context.device), InferenceSettings(m=self.m))
        engine = self.engine or choose(World(model, dataset.train, NoDefense(), training), rounds * training.clients)
        for r in simulate(model, dataset, clients, training, "none", seeds, engine=engine, watch=training.clients):
            watcher.look(r)
        shared = {"setting": run.setting, "seed": run.seed, "rounds": rounds}
        return [shared | row for row in watcher.rows()]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return the paper's numbers beside ours, per setting and layer, then the class sets."""
        table: list[Row] = []
        settings = {
            setting: group(mine, "layer") for (setting,), mine in group(InferredRow.read(rows), "setting").items()
        }
        for setting, layers in settings.items():
            for (layer,), mine in layers.items():
                if layer != CLASSES:
                    paper = published()["table1"]["rows"][setting][DENSE.index(layer)] if layer in DENSE else "-"
                    scores = {name: _range([getattr(r, name) for r in mine]) for name in (*CONTROLS, "blind")}
                    table.append({"setting": setting, "layer": layer, "paper": paper, **scores, "seeds": len(mine)})
        for setting, layers in settings.items():
            if sets := layers.get((CLASSES,)):
                exact = ", ".join(f"{rule} {fmean(getattr(r, rule) for r in sets):.2f}" for rule in RULES)
                table.append({"setting": setting, "layer": "class set exact", "paper": "-", "own": exact})
        return table

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw cor with the own class, the controls and the paper's number, per setting and dense layer."""
        panels: dict[str, list[Dot]] = {}
        layers = group(InferredRow.read(rows), "setting", "layer")
        for setting in dict.fromkeys(setting for setting, _ in layers):
            for layer, paper in zip(DENSE, published()["table1"]["rows"][setting], strict=True):
                if mine := layers.get((setting, layer)):
                    dots = [Dot.of(f"{layer}, {n}", [getattr(r, n) for r in mine], look) for n, look in LOOKS.items()]
                    panels.setdefault(setting, []).extend([*dots, Dot.of(f"{layer}, paper", [paper], PAPER)])
        dot_panels(path, panels, "cor, mean and range over seeds")
        return True

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the high correlation, what it means, and the class sets."""
        verdicts = []
        layers = group(InferredRow.read(rows), "setting", "layer")
        for layer, paper in zip(DENSE, published()["table1"]["rows"][FIRST], strict=True):
            if mine := layers.get((FIRST, layer)):
                verdicts += _one_layer(layer, paper, mine)
        settings = dict.fromkeys(setting for setting, _ in layers if setting != FIRST)
        verdicts += [_whole_row(s, [layers.get((s, layer), []) for layer in DENSE]) for s in settings]
        for setting in (FIRST, "E=5, B=32"):
            if sets := layers.get((setting, CLASSES)):
                best = max(fmean(r.bias_sign for r in sets), fmean(r.row_sum for r in sets))
                claim = f"The class set is read off the update ({setting})"
                rule = "exact class sets in at least 0.97 of the updates, by bias sign or row sum"
                verdicts.append(judge(claim, best >= 0.97, rule, "-", f"{best:.3f}"))
        return verdicts


class _Watcher:
    """Infers from every update of every round, and keeps the running sums."""

    def __init__(self, chain: LayerChain, num_classes: int, public: Tensor, settings: InferenceSettings) -> None:
        self.chain, self.num_classes, self.public, self.settings = chain, num_classes, public, settings
        self.layers = [visit.path for visit in chain.layers]
        self.values: dict[tuple[str, str], list[Tensor]] = {}  # one mean a round; read at the end, so that a GPU
        self.sets: dict[str, list[Tensor]] = {}  # is not waited for in every round

    def look(self, r: Round) -> None:
        """Infer from one round's updates and compare with the truth."""
        assert r.sent is not None
        names = r.watched[0].update.gradient
        gradients = {n: torch.stack([w.update.gradient[n] for w in r.watched]) for n in names}
        found = infer_stacked(self.chain, gradients, self.settings)
        devices, k = len(r.watched), self.num_classes
        like = next(r.sent.parameters())
        inputs = torch.cat([w.truth.inputs for w in r.watched]).to(like)
        groups = torch.cat([w.truth.labels.to(like.device) + k * d for d, w in enumerate(r.watched)])
        truth = class_means(r.sent, self.layers, inputs, groups, k * devices)
        present = (groups.bincount(minlength=k * devices) > 0).view(devices, k)
        blind = class_means(r.sent, self.layers, self.public, torch.zeros(len(self.public)).long().to(like.device), 1)
        self._keep(found, truth, blind, present)
        for rule in RULES:
            guess = RULES[rule](gradients[f"{self.layers[-1]}.weight"], gradients[f"{self.layers[-1]}.bias"])[0]
            self.sets.setdefault(rule, []).append(class_set_accuracy(guess, present).mean())

    def _keep(self, found: Inferred, truth: dict[str, Tensor], blind: dict[str, Tensor], present: Tensor) -> None:
        for layer, vectors in found.vectors.items():
            means = truth[layer].view(*present.shape, -1)
            scores = representation_scores(vectors, means, present)
            scores["blind"] = correlation(blind[layer][0], means)[present]
            for name, value in scores.items():
                self.values.setdefault((layer, name), []).append(value.nanmean())

    def rows(self) -> list[Row]:
        """Return the means over rounds: one row per layer, last layer last, then the class sets."""
        table: list[Row] = []
        for layer in self.layers:
            named = {name: self.values[layer, name] for name in (*CONTROLS, "blind")}
            table.append({"layer": layer} | {name: float(torch.stack(v).nanmean()) for name, v in named.items()})
        return [*table, {"layer": CLASSES} | {rule: float(torch.stack(v).mean()) for rule, v in self.sets.items()}]


def _one_layer(layer: str, paper: float, mine: Sequence[InferredRow]) -> list[Judgement]:
    """Judge the correlation at a layer, and whether it is that of the class."""
    own, wrong, blind = fmean(r.own for r in mine), fmean(r.wrong for r in mine), fmean(r.blind for r in mine)
    nearest = fmean(r.nearest for r in mine)
    return [
        judge(
            f"cor at {layer} is near {paper} ({FIRST})",
            abs(own - paper) <= NEAR,
            f"mean cor within {NEAR} of the paper's",
            str(paper),
            f"{own:.3f}",
        ),
        judge(
            f"at {layer} the inferred representation tells its class from the other one on the device",
            nearest >= 0.9,
            "its own class is the nearest in at least 0.9 of the cases (chance 0.5)",
            "implied; no control was run",
            f"nearest {nearest:.2f}; cor with the wrong class {wrong:.3f}, of a blind guess {blind:.3f}",
        ),
    ]


def _whole_row(setting: str, layers: Sequence[Sequence[InferredRow]]) -> Judgement:
    paper = published()["table1"]["rows"][setting]
    ours = [fmean(r.own for r in mine) for mine in layers if mine]
    near = all(abs(a - b) <= NEAR for a, b in zip(ours, paper, strict=False))
    return judge(
        f"cor at {', '.join(DENSE)} is near {' / '.join(map(str, paper))} ({setting})",
        near and len(ours) == len(paper),
        f"mean cor within {NEAR} of the paper's at every layer",
        " / ".join(map(str, paper)),
        " / ".join(f"{value:.3f}" for value in ours),
    )


def _range(values: Sequence[float]) -> str:
    """Return the mean over seeds, and the lowest and highest where there are several."""
    return f"{spread(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"
