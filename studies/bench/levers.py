"""Which levers make a promise cheaper: one linear layer on the fixed features of MNIST, one lever at a time.

The mechanism is `veil`'s, written out for a linear layer, where a record's gradient is δ φᵀ and its length |δ||φ|: a
whole run takes a second. Clients as in `promises.py`: two classes each, all records in one step, devices take turns.
Each row is the best of the same tries of learning rate and clip on training records that no device holds, mean over
seeds; no test record is looked at. The shape of noise follows from the features of those records, without their
classes. `--features` is the file of wavelets that `promises.py` keeps.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf, isinf, sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from promises import MODELS, PROMISES, Kept, Scene
from torch import Tensor

ROUNDS, DEVICES, SLOTS, CLASSES = 200, 100, 200, 10
ADAM = 0.003  # of the learning rates that are tried
RATES, CLIPS = (3.0, 10.0, 30.0), (0.1, 0.4, 1.6)


@dataclass(frozen=True)
class Lever:
    """How a run is trained; the defaults are those of the promises."""

    name: str = "as promised"
    cohort: int = 10
    batch: int = SLOTS  # records of a local step
    dims: int = 200
    momentum: float = 0.9
    adam: bool = False
    tail: float = 0.25  # share of the rounds over which the weights are averaged; 0: the last round's alone
    alpha: float = 0.0  # noise follows the second moment of public gradients to this power; 0: alike everywhere
    rank: int = 0  # directions of the public second moment that are kept; 0: all
    beta: float = 0.0  # share of its last noise that a client takes off again
    decay: bool = False  # the learning rate falls to zero (cosine)


LEVERS = (
    Lever(),
    *(Lever(f"{k} clients a round", cohort=k) for k in (5, 20, 50)),
    *(Lever(f"batches of {b} (local tier)", batch=b) for b in (100, 50)),
    *(Lever(f"{d} directions", dims=d) for d in (50, 100)),
    Lever("no momentum", momentum=0.0),
    Lever("momentum 0.97", momentum=0.97),
    Lever("Adam on the server", momentum=0.9, adam=True),
    Lever("no mean of the weights", tail=0.0),
    Lever("mean over the last half", tail=0.5),
    Lever("learning rate falls to zero", decay=True),
    *(Lever(f"noise by public gradients, α = {a}", alpha=a) for a in (-0.25, 0.25, 0.5)),
    *(Lever(f"the {r} strongest directions of public gradients alone", rank=r) for r in (50, 100)),
    *(Lever(f"noise less {b} of the last one", beta=b) for b in (0.5, 0.9)),
)


@dataclass(frozen=True)
class Promise:
    """What is promised over the whole run, and to whom; z_run 0: nothing."""

    name: str
    z_run: float
    local: bool = False


ASKED = (
    Promise("none", 0.0),
    Promise("aggregate, z_run 0.5", 0.5),
    Promise("local, z_run 0.4", 0.4, True),
    Promise("aggregate, z_run 1", 1.0),
)


class Run:
    """Trainings of one seed under one lever and one promise, all tries side by side."""

    def __init__(self, scene: Scene, lever: Lever, promise: Promise, seed: int) -> None:
        self.lever, self.promise = lever, promise
        self.rng = torch.Generator().manual_seed(seed)
        self.x, self.y = _rows(scene.dataset.train, lever.dims)
        self.held = _rows(scene.held, lever.dims)
        self.clients = torch.from_numpy(np.stack(scene.clients))
        self.tries = list(product(RATES, CLIPS if promise.z_run else (*CLIPS, inf)))  # undefended runs need not clip
        self.lr, self.clip = (torch.tensor(v).view(-1, 1, 1) for v in zip(*self.tries, strict=True))
        self.moment = self._moment(self.held[0])
        self.maps = self.shape

    def _moment(self, public: Tensor) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and directions of the second moment of features, of records that no device holds."""
        values, vectors = torch.linalg.eigh(public.T @ public / len(public))
        return values.clamp_min(1e-9), vectors

    @property
    def shape(self) -> tuple[Tensor, Tensor]:
        """Return P and its inverse on the side of the features (D, D); for a rank, the projection in place of both."""
        values, vectors = self.moment
        if self.lever.rank:
            top = vectors[:, -self.lever.rank :]
            return top @ top.T, top @ top.T
        sizes = values**self.lever.alpha
        sizes = (sizes / sizes.mean()).sqrt()
        return (vectors / sizes) @ vectors.T, (vectors * sizes) @ vectors.T

    def chosen(self) -> Iterator[Tensor]:
        """Yield who takes part, round by round: all take turns, in a new order each time."""
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(ROUNDS):
            while len(order) < self.lever.cohort:
                order = torch.cat([order, torch.randperm(DEVICES, generator=self.rng)])
            yield order[: self.lever.cohort]
            order = order[self.lever.cohort :]

    def accuracy(self) -> list[float]:
        """Train, and return the accuracy of each try on held-out records."""
        lever = self.lever
        weights = torch.zeros(len(self.tries), CLASSES, self.x.shape[1])
        speed, square, mean, count = (torch.zeros_like(weights) for _ in range(4))
        last = torch.zeros(DEVICES, *weights.shape[1:])  # noise of each device
        for number, devices in enumerate(self.chosen()):
            rate = self.lr * (0.5 * (1 + np.cos(np.pi * number / ROUNDS)) if lever.decay else 1.0)
            records = self.clients[devices]
            records = records.gather(1, torch.rand(records.shape, generator=self.rng).argsort(1))
            moved = torch.zeros(len(self.tries), lever.cohort, *weights.shape[1:])  # by client
            for step in records.split(lever.batch, 1):
                own = weights[:, None] - rate[:, None] * moved
                moved += self._clipped(own, step) / lever.batch
                if self.promise.z_run:
                    moved += self.clip[:, None] * self._noise(devices, last) / lever.batch
            moved = moved.mean(1)
            if lever.adam:
                speed, square = 0.9 * speed + 0.1 * moved, 0.99 * square + 0.01 * moved.square()
                weights = weights - ADAM * rate * speed / (square.sqrt() + 1e-6)
            else:
                speed = lever.momentum * speed + moved
                weights = weights - rate * speed
            if number >= ROUNDS * (1 - lever.tail) or number == ROUNDS - 1:
                mean, count = mean + weights, count + 1
        x, y = self.held
        logits = torch.einsum("nd,scd->snc", x, mean / count)
        return (logits.argmax(2) == y).float().mean(1).tolist()

    def _clipped(self, weights: Tensor, records: Tensor) -> Tensor:
        """Return the clients' sums of gradients (tries, K, C, D), records (K, N) clipped in the coordinates of P."""
        x, y = self.x[records], torch.eye(CLASSES)[self.y[records]]
        into = x @ self.maps[0]
        delta = torch.einsum("knd,skcd->sknc", x, weights).softmax(3) - y
        length = delta.norm(dim=3) * into.norm(dim=2)
        factor = (self.clip / length.clamp_min(1e-30)).clamp_max(1.0)
        return torch.einsum("sknc,knd->skcd", delta * factor[..., None], into if self.lever.rank else x)

    def _noise(self, devices: Tensor, last: Tensor) -> Tensor:
        """Return each client's noise (K, C, D) for a clip of 1: the same draws for all tries."""
        part = ROUNDS * self.lever.cohort // DEVICES  # participations of a device
        beta = self.lever.beta  # Gaussian DP of the run: |C⁻¹ 1|² with C = 1 - β × the participation before
        sums = [(1 - beta**t) / (1 - beta) for t in range(1, part + 1)]
        z = self.promise.z_run * sqrt(sum(s * s for s in sums))
        fresh = torch.randn(len(devices), *last.shape[1:], generator=self.rng)
        found = fresh - beta * last[devices]
        last[devices] = fresh
        share = 1.0 if self.promise.local else 1 / sqrt(self.lever.cohort)
        return z * share * found @ self.maps[1]


def _rows(split: object, dims: int) -> tuple[Tensor, Tensor]:
    """Return features with a one beside them, in so many directions, and classes."""
    images, labels = torch.from_numpy(split.images)[:, :dims], split.labels  # type: ignore[attr-defined]
    return torch.cat([images, torch.ones(len(images), 1)], 1), labels


def fits(lever: Lever, promise: Promise) -> bool:
    """Return whether a promise can be kept under a lever: several local steps split no noise."""
    return lever.batch == SLOTS or promise.local or not promise.z_run


def main() -> None:
    """Try every lever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/levers.json"))
    given = parser.parse_args()
    kept = Kept.make("mnist", MODELS["mnist"], given.features, "cpu")
    scenes = {seed: Scene.make(kept, PROMISES[0], seed) for seed in given.seeds}
    rows = []
    for lever in LEVERS:
        row: dict[str, object] = {"lever": lever.name}
        for promise in ASKED:
            if fits(lever, promise):
                runs = [Run(scene, lever, promise, seed) for seed, scene in scenes.items()]
                each = [fmean(one) for one in zip(*(run.accuracy() for run in runs), strict=True)]
                best = max(range(len(each)), key=each.__getitem__)
                lr, clip = runs[0].tries[best]
                row[promise.name] = {"accuracy": each[best], "choice": [lr, None if isinf(clip) else clip]}
        rows.append(row)
        print(json.dumps(row), flush=True)
        given.out.write_text(json.dumps({"seeds": given.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
