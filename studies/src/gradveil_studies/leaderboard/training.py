"""What a defence costs: each entry trains with the same tries of the learning rate, chosen on held-out records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from torch import nn

from gradveil.data import load
from gradveil.data.base import Dataset, Split
from gradveil.data.partition import Indices, partition, undealt
from gradveil.errors import GradveilError
from gradveil.federated.client import evaluate
from gradveil.federated.engines import World
from gradveil.federated.settings import Training
from gradveil.federated.simulate import assign, choose
from gradveil.models import build as build_model
from gradveil.protection.defense import build as build_defense
from gradveil.protection.defense import noise_row
from gradveil.tree import Params, parameters
from gradveil_studies.leaderboard.entries import MULTIPLES, Entry, Panel, run_seeds
from gradveil_studies.paper.base import Context, Row
from gradveil_studies.together import Variant, simulate_together

HELD_OUT = 5000  # training records that no device holds, at most: learning rates are chosen on them


@dataclass(frozen=True)
class Tuning:
    """One training."""

    entry: Entry
    seed: int
    multiple: int


def trained(entries: Sequence[Entry], panel: Panel, split: str, context: Context) -> dict[Entry, list[Row]]:
    """Train each entry with every multiple on the first seed, and with the chosen one on the others."""
    work = _Work(panel, split, context)
    rows = work.rows([Tuning(entry, 0, multiple) for multiple in MULTIPLES for entry in entries])
    best = {entry: chosen_multiple([row for row in rows[entry] if "held_out" in row]) for entry in entries}
    more = [Tuning(entry, seed, best[entry]) for seed in range(1, panel.seeds) for entry in entries if best[entry]]
    for entry, found in work.rows(more).items():
        rows[entry] += found
    return rows


def chosen_multiple(tries: Sequence[Row]) -> int:
    """Return the multiple with the best accuracy on held-out records; of equals the smallest; 0: none ended."""
    best = max(tries, key=lambda row: (row["held_out"], -row["multiple"]), default=None)
    return 0 if best is None else int(best["multiple"])


def settled(rows: Sequence[Row]) -> dict[int, Row]:
    """Return, by seed, the runs at the chosen multiple, of one entry's rows on one split."""
    ended = [row for row in rows if "held_out" in row]
    multiple = chosen_multiple([row for row in ended if row["seed"] == 0])
    return {row["seed"]: row for row in ended if row["multiple"] == multiple}


def mean_accuracy(rows: Mapping[int, Row]) -> float:
    """Return the mean over seeds."""
    return fmean(row["accuracy"] for row in rows.values())


class _Work:
    def __init__(self, panel: Panel, split: str, context: Context) -> None:
        self.panel, self.split, self.context = panel, split, context
        self.dataset = load(panel.dataset, context.data)

    def rows(self, runs: Sequence[Tuning]) -> dict[Entry, list[Row]]:
        """Train the runs, those with the same settings together; a run that fails has a row that says why."""
        found: dict[Entry, list[Row]] = {run.entry: [] for run in runs}
        for training, some in self._together(runs):
            try:
                made = self._train(some, training)
            except GradveilError as error:
                made = [{"why": str(error)} for _ in some] if len(some) == 1 else self._one_by_one(some, training)
            for run, row in zip(some, made, strict=True):
                about: Row = {"kind": "training", "dataset": self.panel.dataset, "split": self.split}
                about |= {"defense": run.entry.name, "seed": run.seed, "multiple": run.multiple, "lr": training.lr}
                about |= noise_row(build_defense(run.entry.spec))
                found[run.entry].append(about | row)
        return found

    def _one_by_one(self, runs: Sequence[Tuning], training: Training) -> list[Row]:
        found: list[Row] = []
        for run in runs:
            try:
                found += self._train([run], training)
            except GradveilError as error:
                found.append({"why": str(error)})
        return found

    def _together(self, runs: Sequence[Tuning]) -> Iterator[tuple[Training, list[Tuning]]]:
        groups: dict[tuple[Training, str, str], list[Tuning]] = {}
        for run in runs:
            training = self.panel.training(run.entry, run.multiple)
            groups.setdefault((training, self._engine(run, training), run.entry.model), []).append(run)
        for (training, *_), some in groups.items():
            yield training, some

    def _engine(self, run: Tuning, training: Training) -> str:
        if self.context.device.type != "cuda":
            return "sequential"
        world = World(self._model(run), self.dataset.train, build_defense(run.entry.spec), training)
        return choose(world, training.rounds * training.clients)

    def _model(self, run: Tuning) -> nn.Module:
        seed = run_seeds(self.context.seeds, run.seed).number("weights")
        name, data = run.entry.model or self.panel.model, self.dataset
        model = build_model(name, data.input_shape, data.num_classes, seed=seed)
        return model.to(self.context.device)

    def _train(self, runs: Sequence[Tuning], training: Training) -> list[Row]:
        clients = {run.seed: self._clients(run.seed) for run in runs}
        variants = [
            Variant(self._model(run), clients[run.seed], run.entry.spec, run_seeds(self.context.seeds, run.seed))
            for run in runs
        ]
        engine = self._engine(runs[0], training)
        means = [Averaged() for _ in runs]
        last: list[nn.Module] = []
        rejected = [0 for _ in runs]
        for done in simulate_together(variants, self.dataset, training, engine=engine):
            last = [one.model for one in done]
            rejected = [count + sum(one.rejected.values()) for count, one in zip(rejected, done, strict=True)]
            if done[0].number > 0.75 * training.rounds:
                for mean, model in zip(means, last, strict=True):
                    mean.add(model)
        return [
            self._scored(run, clients[run.seed], mean, model) | {"rounds": training.rounds, "rejected": refused}
            for run, mean, model, refused in zip(runs, means, last, rejected, strict=True)
        ]

    def _clients(self, seed: int) -> list[Indices]:
        rng = run_seeds(self.context.seeds, seed).numpy("split")
        return partition(self.dataset.train.labels, self.panel.splits[self.split], rng)

    def _scored(self, run: Tuning, clients: Sequence[Indices], mean: "Averaged", last: nn.Module) -> Row:
        after = evaluate(last, self.dataset.test).accuracy
        mean.into(last)
        rng = run_seeds(self.context.seeds, run.seed).numpy("held out")
        held_out = evaluate(last, held_out_records(self.dataset, clients, rng)).accuracy
        return {"held_out": held_out, "accuracy": evaluate(last, self.dataset.test).accuracy, "last_round": after}


class Averaged:
    """The mean of a model's weights over some rounds."""

    def __init__(self) -> None:
        self.total: Params = {}
        self.count = 0

    def add(self, model: nn.Module) -> None:
        own = parameters(model)
        if not self.total:
            self.total = {name: torch.zeros_like(value) for name, value in own.items()}
        torch._foreach_add_(list(self.total.values()), [value.detach() for value in own.values()])
        self.count += 1

    def into(self, model: nn.Module) -> None:
        assign(model, {name: value / self.count for name, value in self.total.items()})


def held_out(dataset: Dataset, clients: Sequence[Indices], rng: np.random.Generator) -> Indices:
    """Return the numbers of training records that no device holds."""
    left = undealt(len(dataset.train), clients)
    if not len(left):
        raise GradveilError(f"All training records of {dataset.name} are dealt out: none is left to choose rates on.")
    chosen: Indices = rng.permutation(left)[:HELD_OUT]
    return chosen


def held_out_records(dataset: Dataset, clients: Sequence[Indices], rng: np.random.Generator) -> Split:
    """Return those records."""
    chosen, train = held_out(dataset, clients, rng), dataset.train
    return replace(train, images=train.images[chosen], labels=train.labels[torch.from_numpy(chosen)])
