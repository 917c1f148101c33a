"""Table 1: how well class-wise representations are inferred from updates, with the controls the table lacks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradveil.attacks.inference import RULES, InferenceSettings, Inferred, LayerChain, chain_of, infer_stacked
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.defenses.base import NoDefense
from gradveil.federated.engines import World
from gradveil.federated.settings import Training
from gradveil.federated.simulate import Round, choose, simulate
from gradveil.metrics.representations import (
    CONTROLS,
    class_means,
    class_set_accuracy,
    correlation,
    representation_scores,
)
from gradveil.models import build
from gradveil.paper.base import ITEMS, Context, Item, Judgement, Row, published
from gradveil.paper.figures import PAPER, PROMISED, REACHED, SOUND, Dot, dot_panels
from gradveil.seeds import Seeds

LOOKS = {"own": PROMISED, "wrong": SOUND, "blind": REACHED}
BLIND = 500  # public images whose mean representation is the blind guess
DENSE = ("fc1", "fc2", "fc3")
NEAR = 0.05  # of the paper's cor


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
    m: float = 0.5  # rows per class: the paper's M, as a share
    seeds: int = 3
    rounds: int = 200  # quick: a tenth
    engine: str | None = None  # None: stacked clients on CUDA; on a CPU worker processes where the run is long enough

    def units(self, context: Context) -> list[str]:
        """Return setting/seed for the paper's six rows; quick: one seed and fewer rounds."""
        return [
            f"{s}/{seed}" for seed in range(self.seeds if context.full else 1) for s in published()["table1"]["rows"]
        ]

    def run(self, unit: str, context: Context) -> list[Row]:
        """Train in one setting and infer in every round; one row per layer, and one for the class sets."""
        setting, seed = unit.rsplit("/", 1)
        epochs, batch_size = (int(n) for n in re.findall(r"=(\d+)", setting))
        spec = "iid:devices=100,per_device=40" if "IID" in setting else "classes:devices=100,classes=2,per_class=20"
        dataset = load(self.dataset, context.data)
        seeds = Seeds(context.seeds.number("table1", seed))
        clients = partition(dataset.train.labels, spec, seeds.numpy("split"))
        model = build(self.model, dataset.input_shape, dataset.num_classes, seed=seeds.number("weights"))
        model = model.to(context.device)
        public = dataset.test.batch(torch.randperm(len(dataset.test), generator=seeds("public"))[:BLIND]).inputs
        rounds = self.rounds if context.full else max(self.rounds // 10, 1)
        training = Training(rounds=rounds, clients=10, epochs=epochs, batch_size=batch_size, lr=0.01)
        chain = chain_of(model, dataset.input_shape, dataset.num_classes)
        watcher = _Watcher(chain, dataset.num_classes, public.to(context.device), InferenceSettings(m=self.m))
        engine = self.engine or choose(World(model, dataset.train, NoDefense(), training), rounds * training.clients)
        for r in simulate(model, dataset, clients, training, "none", seeds, engine=engine, watch=training.clients):
            watcher.look(r)
        shared = {"setting": setting, "seed": int(seed), "rounds": training.rounds}
        return [shared | row for row in watcher.rows()]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Return the paper's numbers beside ours, per setting and layer, then the class sets."""
        table = []
        for setting in dict.fromkeys(r["setting"] for r in rows):
            mine = [r for r in rows if r["setting"] == setting]
            for layer in dict.fromkeys(r["layer"] for r in mine):
                if layer != "classes":
                    table.append(_line(setting, layer, [r for r in mine if r["layer"] == layer]))
        for setting in dict.fromkeys(r["setting"] for r in rows):
            sets = [r for r in rows if r["setting"] == setting and r["layer"] == "classes"]
            if sets:
                said = ", ".join(f"{rule} {_mean(sets, rule):.2f}" for rule in RULES)
                table.append({"setting": setting, "layer": "class set exact", "paper": "-", "own": said})
        return table

    def draw(self, rows: Sequence[Row], path: Path) -> bool:
        """Draw cor with the own class, the controls and the paper's number, per setting and dense layer."""
        panels: dict[str, list[Dot]] = {}
        for setting in dict.fromkeys(r["setting"] for r in rows):
            for layer, paper in zip(DENSE, published()["table1"]["rows"][setting], strict=True):
                mine = [r for r in rows if (r["setting"], r["layer"]) == (setting, layer)]
                if not mine:
                    continue
                found = [Dot.of(f"{layer}, {key}", [r[key] for r in mine], look) for key, look in LOOKS.items()]
                panels.setdefault(setting, []).extend([*found, Dot.of(f"{layer}, paper", [paper], PAPER)])
        dot_panels(path, panels, "cor, mean and range over seeds")
        return True

    def verdicts(self, rows: Sequence[Row]) -> list[Judgement]:
        """Judge the high correlation, what it means, and the class sets."""
        found = []
        first = [r for r in rows if r["setting"] == "E=1, B=32"]
        for layer in (name for name in DENSE if any(r["layer"] == name for r in first)):
            mine = [r for r in first if r["layer"] == layer]
            paper = published()["table1"]["rows"]["E=1, B=32"][DENSE.index(layer)]
            own, wrong, nearest, blind = (_mean(mine, name) for name in ("own", "wrong", "nearest", "blind"))
            found.append(
                Judgement(
                    f"cor at {layer} is near {paper} (E=1, B=32)",
                    "reproduced" if abs(own - paper) <= NEAR else "not reproduced",
                    f"mean cor within {NEAR} of the paper's",
                    str(paper),
                    f"{own:.3f}",
                )
            )
            found.append(
                Judgement(
                    f"at {layer} the inferred representation tells its class from the other one on the device",
                    "reproduced" if nearest >= 0.9 else "not reproduced",
                    "its own class is the nearest in at least 0.9 of the cases (chance 0.5)",
                    "implied; no control was run",
                    f"nearest {nearest:.2f}; cor with the wrong class {wrong:.3f}, of a blind guess {blind:.3f}",
                )
            )
        found += [_whole_row(s, rows) for s in dict.fromkeys(r["setting"] for r in rows if r["setting"] != "E=1, B=32")]
        for setting in ("E=1, B=32", "E=5, B=32"):
            sets = [r for r in rows if r["setting"] == setting and r["layer"] == "classes"]
            if sets:
                best = max(_mean(sets, rule) for rule in ("bias_sign", "row_sum"))
                status = "reproduced" if best >= 0.97 else "not reproduced"
                rule = "exact class sets in at least 0.97 of the updates, by bias sign or row sum"
                found.append(
                    Judgement(f"The class set is read off the update ({setting})", status, rule, "-", f"{best:.3f}")
                )
        return found


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
        return [*table, {"layer": "classes"} | {rule: float(torch.stack(v).mean()) for rule, v in self.sets.items()}]


def _whole_row(setting: str, rows: Sequence[Row]) -> Judgement:
    """Judge the correlations of one setting at all layers together."""
    paper = published()["table1"]["rows"][setting]
    mine = [[r for r in rows if (r["setting"], r["layer"]) == (setting, layer)] for layer in DENSE]
    ours = [_mean(r, "own") for r in mine if r]
    near = all(abs(a - b) <= NEAR for a, b in zip(ours, paper, strict=False))
    return Judgement(
        f"cor at {', '.join(DENSE)} is near {' / '.join(map(str, paper))} ({setting})",
        "reproduced" if near and len(ours) == len(paper) else "not reproduced",
        f"mean cor within {NEAR} of the paper's at every layer",
        " / ".join(map(str, paper)),
        " / ".join(f"{value:.3f}" for value in ours),
    )


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([r[name] for r in rows]))


def _line(setting: str, layer: str, rows: Sequence[Row]) -> Row:
    paper = published()["table1"]["rows"][setting][DENSE.index(layer)] if layer in DENSE else "-"
    line: Row = {"setting": setting, "layer": layer, "paper": paper}
    return line | {name: _range(rows, name) for name in (*CONTROLS, "blind")} | {"seeds": len(rows)}


def _range(rows: Sequence[Row], name: str) -> str:
    """Return the mean over seeds, and the lowest and highest where there are several."""
    values = [r[name] for r in rows]
    return f"{np.mean(values):.3f}" + (f" [{min(values):.3f}, {max(values):.3f}]" if len(values) > 1 else "")
