"""What a promise costs on a frozen backbone: accuracy under `veil` beside the undefended run, in several worlds.

The model is `features` (a pretrained backbone, directions from public examples without their labels, one linear layer).
What is trained is simulated exactly: a record's gradient in a linear layer is δ φᵀ and φ has length 1, so a run of
1,000 rounds takes seconds, with the clip, the noise and the turns of `veil`. `--product` trains the chosen settings
with the product's own rounds beside it. Rate, clip and directions are chosen by the same rule for every row, the
undefended one too (which may clip, and take batches of 32): the best on records that nobody holds, of seeds that no row
has. Rows are of other seeds; the model is the mean of weights over the last quarter of rounds. `--first N` deals
out of the first N training records alone. Features are kept under GRADVEIL_CACHE.
"""

import argparse
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from promises import judged
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil.auditing.train import FIT
from gradveil.data import load
from gradveil.data.base import Dataset, Split
from gradveil.data.partition import Indices, partition, undealt
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.models import build
from gradveil.models.features import Frozen, keep_features
from gradveil.models.scatter import Basis
from gradveil.privacy.plan import HeadRun, rehearse, z_run_of
from gradveil.seeds import Seeds
from gradveil_studies.leaderboard.training import Averaged

LITE0 = (
    "features:backbone=efficientnet_lite0,mirror=true,init=zeros,"
    "layer=_blocks.7._swish/_blocks.10._swish/_blocks.14._swish/_blocks.15._swish/_swish"
)
MINILM = "features:backbone=minilm,init=zeros"


@dataclass(frozen=True)
class Promise:
    """What is promised over the whole run, to whom, and the points that it may cost."""

    name: str
    spec: str = ""  # of veil, without tier and clip; empty: nothing
    local: bool = False
    aim: float = inf  # points lost, at most
    least: float = 0.0  # accuracy

    @property
    def z_run(self) -> float:
        """The noise multiplier of the whole run."""
        if not self.spec:
            return 0.0
        key, _, value = self.spec.partition("=")
        return z_run_of(**{key: value if key == "promise" else float(value)})  # type: ignore[arg-type]


NONE = Promise("none")


@dataclass(frozen=True)
class World:
    """Who trains on what."""

    name: str
    dataset: str
    model: str  # empty: the columns of a table
    split: str  # how records are dealt out
    rounds: int
    cohort: int
    promises: Sequence[Promise]
    epochs: int = 1
    dims: Sequence[int] = (200, 400, 600)
    score: str = "accuracy"
    aside: int = 5000  # records that nobody holds, beside the public ones, at most
    tested: int = 10**6  # records of the test split, from the first, at most
    tuning: int = 1  # seeds that settings are chosen on: more where few records are held out


def _usual(none: float, *rows: tuple[str, str, bool, float, float]) -> tuple[Promise, ...]:
    return (replace(NONE, least=none), *(Promise(*row) for row in rows))


IMAGES = _usual(
    0.0,
    ("aggregate, z_run 0.5", "promise=reconstruction", False, 0.5, 0.80),
    ("aggregate, z_run 1", "promise=identification", False, 1.0, 0.79),
    ("aggregate, ε = 2", "epsilon=2", False, 2.5, 0.77),
    ("local, z_run 0.4", "rho=3.125", True, 2.0, 0.78),
)
SILOS = _usual(
    0.0,
    ("aggregate, z_run 0.5", "promise=reconstruction", False, 1.0, 0.0),
    ("aggregate, ε = 2", "epsilon=2", False, 1.0, 0.0),
    ("local, z_run 0.5", "promise=reconstruction", True, 2.0, 0.0),
    ("local, z_run 1", "promise=identification", True, 2.0, 0.0),
    ("local, ε = 2", "epsilon=2", True, 2.0, 0.0),
)
WORDS = _usual(
    0.0,
    ("aggregate, ε = 8", "epsilon=8", False, 1.0, 0.0),
    ("aggregate, ε = 2", "epsilon=2", False, 1.0, 0.0),
    ("local, ε = 8", "epsilon=8", True, 1.0, 0.0),
)
TABLE = _usual(
    0.0,
    ("aggregate, ε = 4", "epsilon=4", False, 1.0, 0.0),
    ("aggregate, ε = 2", "epsilon=2", False, 1.0, 0.0),
    ("local, ε = 4", "epsilon=4", True, 1.0, 0.0),
)
PAPER = "classes:devices=100,classes=2,per_class=100"
SILO = "iid:devices=10,per_device=2000"
ADULT = "table:path=adult.csv,target=classification"
TEXTS = (
    ("trec", "text:path=trec.txt,length=24,vocabulary=20000", "iid:devices=20,per_device=200"),
    ("ag_news", "text:path=ag_news.txt,length=64,vocabulary=20000", "iid:devices=20,per_device=250"),
    ("subj", "text:path=subj.txt,length=48,vocabulary=20000", "iid:devices=20,per_device=350"),
)
FEW, SOME = (50, 100, 200, 300), (150, 300, 600)
FOUND = (
    World("cifar10", "cifar10", LITE0, PAPER, 1000, 10, IMAGES),
    World("cifar10, 10 silos", "cifar10", LITE0, SILO, 100, 10, SILOS, dims=SOME, tested=3000),
    World("cifar10, 10 silos, 5 local epochs", "cifar10", LITE0, SILO, 20, 10, SILOS, 5, dims=SOME, tested=3000),
    *(World(name, texts, MINILM, split, 100, 20, WORDS, 1, FEW, tuning=2) for name, texts, split in TEXTS),
    World("ag_news, 5 local epochs", TEXTS[1][1], MINILM, TEXTS[1][2], 20, 20, WORDS, 5, FEW, tuning=2),
    World("breast cancer", "breast_cancer", "", "iid:devices=5,per_device=60", 100, 5, TABLE, 1, (0,), "auc", 60, 20),
    World("adult", ADULT, "", "iid:devices=20,per_device=500", 100, 20, TABLE, 1, (0,), "auc"),
)
WORLDS = {world.name: world for world in FOUND}


@dataclass(frozen=True)
class Choice:
    """Settings of a training."""

    lr: float
    clip: float = inf
    dims: int = 0
    batch: int = 0  # records of a local step; 0: all


@dataclass(frozen=True)
class Rows:
    """A data set as the backbone puts it out, whatever the seed."""

    world: World
    dataset: Dataset
    train: Tensor
    test: Tensor

    @classmethod
    def make(cls, world: World, data: str | None, first: int) -> "Rows":
        dataset = load(world.dataset, data)
        count = min(first or len(dataset.train), len(dataset.train))
        parts = [(dataset.train, count), (dataset.test, min(world.tested, len(dataset.test)))]
        if not world.model:
            return cls(world, dataset, *(split.batch(slice(0, n)).inputs for split, n in parts))
        model = build(world.model, dataset.input_shape, dataset.num_classes, modality=dataset.modality)
        backbone = model.get_submodule("features")
        assert isinstance(backbone, Frozen)

        def passed(split: Split, n: int) -> Tensor:
            found = []
            for some in torch.arange(n).split(200):
                inputs = split.batch(some).inputs
                keep_features(model, inputs)
                found.append(backbone(inputs))
            return torch.cat(found)

        return cls(world, dataset, *(passed(split, n) for split, n in parts))


def _directions(public: Tensor, count: int) -> Callable[[Tensor], Tensor]:
    basis = Basis(public.shape[1], count)
    basis.fit(public)
    return lambda rows: torch.cat([some @ basis.directions.T + basis.offset for some in rows.split(2000)])


def _columns(public: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what standardises the columns of a table, rare categories less so, and puts a one beside them."""
    middle, spread = public.mean(0), public.std(0).clamp_min(0.1)
    return lambda rows: F.pad((rows - middle) / spread, (0, 1), value=1.0)


@dataclass(frozen=True)
class Scene:
    """One seed's devices, and the records in the directions that its public examples decide."""

    rows: Rows
    seed: int

    @cached_property
    def clients(self) -> list[Indices]:
        return partition(self._labels, self.rows.world.split, Seeds(self.seed)("partition"))

    @property
    def _labels(self) -> Tensor:
        return self.rows.dataset.train.labels[: len(self.rows.train)]

    @cached_property
    def parts(self) -> tuple[Indices, Indices]:
        """Public records, whose labels are not looked at, and others that settings are chosen on."""
        left = undealt(len(self.rows.train), self.clients)
        left = left[torch.randperm(len(left), generator=Seeds(self.seed)("public records")).numpy()]
        some = min(FIT, len(left) // 2)
        return left[:some], left[some : some + self.rows.world.aside]

    @cached_property
    def data(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Records in the main directions and labels: of the clients' by client, held out, and the test split's."""
        public, aside = (torch.from_numpy(part) for part in self.parts)
        x, y = self.rows.train, self._labels
        raw = _columns(x[public]) if not self.rows.world.model else _directions(x[public], max(self.rows.world.dims))
        own = torch.from_numpy(np.stack(self.clients))
        return {
            "train": (raw(x[own.flatten()]).view(*own.shape, -1), y[own]),
            "held": (raw(x[aside]), y[aside]),
            "public": (raw(x[public]), y[public]),
            "test": (raw(self.rows.test), self.rows.dataset.test.labels[: len(self.rows.test)]),
        }

    def of(self, part: str, dims: int) -> tuple[Tensor, Tensor]:
        """Return records of unit length in so many directions (0: all), and labels."""
        x, y = self.data[part]
        return F.normalize(x[..., : dims or None], dim=-1), y

    def turns(self) -> Iterator[Tensor]:
        """Yield who takes part, round by round: all take turns, in a new order each time."""
        rng, order = Seeds(self.seed)("turns"), torch.empty(0, dtype=torch.int64)
        for _ in range(self.rows.world.rounds):
            while len(order) < self.rows.world.cohort:
                order = torch.cat([order, torch.randperm(len(self.clients), generator=rng)])
            yield order[: self.rows.world.cohort]
            order = order[self.rows.world.cohort :]

    def noise(self, promise: Promise) -> float:
        """Return the deviation of a client's noise in a step, in clips."""
        world = self.rows.world
        uses = -(-world.rounds * world.cohort // len(self.clients)) * world.epochs
        return promise.z_run * sqrt(uses) / (1.0 if promise.local else sqrt(world.cohort))

    def fits(self, promise: Promise) -> bool:
        """Return whether a promise can be kept here: several local steps split no noise."""
        return promise.local or not promise.z_run or self.rows.world.epochs == 1

    def scores(self, promise: Promise, choices: Sequence[Choice], held: bool) -> list[float]:
        """Train with each choice (of one number of directions and batch size), and return what they score."""
        world, batch = self.rows.world, choices[0].batch
        x, y = self.of("train", choices[0].dims)
        kinds, slots = self.rows.dataset.num_classes, x.shape[1]
        lr, clip = (torch.tensor(v).view(-1, 1, 1, 1) for v in zip(*((c.lr, c.clip) for c in choices), strict=True))
        weights = torch.zeros(len(choices), kinds, dims := x.shape[-1])
        speed, mean, count = torch.zeros_like(weights), torch.zeros_like(weights), 0
        std, rng = self.noise(promise), Seeds(self.seed)("noise")
        steps = world.epochs * (1 if not batch else -(-slots // batch))
        for number, devices in enumerate(self.turns(), 1):
            some, targets = x[devices], F.one_hot(y[devices], kinds).float()  # (K, N, D), (K, N, C)
            if steps == 1:  # no client's weights differ from another's: their sum is all that counts
                some, targets = some.flatten(0, 1)[None], targets.flatten(0, 1)[None]
            each, k = std * sqrt(len(devices) / len(some)), len(some)
            moved, size = torch.zeros(len(choices), k, kinds, dims), batch or some.shape[1]
            for at in range(steps):
                start = at % (steps // world.epochs) * size
                own = some[:, start : start + size]
                now = (weights[:, None] - lr * moved).transpose(0, 1).flatten(1, 2)  # (K, T * C, D)
                logits = (own @ now.transpose(1, 2)).view(k, own.shape[1], len(choices), kinds)
                delta = logits.softmax(3) - targets[:, start : start + size, None]
                delta *= (clip.view(1, 1, -1, 1) / delta.norm(dim=3, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
                found = (delta.flatten(2).transpose(1, 2) @ own).view(k, len(choices), kinds, dims).transpose(0, 1)
                if std:
                    found = found + clip * each * torch.randn(k, kinds, dims, generator=rng)
                moved = moved + found / own.shape[1]
            speed = 0.9 * speed + moved.mean(1)
            weights = weights - lr[:, 0] * speed
            if number > 0.75 * world.rounds:
                mean, count = mean + weights, count + 1
        rows, labels = self.of("held" if held else "test", choices[0].dims)
        return [self._score(rows @ (one / count).T, labels) for one in mean]

    def _score(self, logits: Tensor, labels: Tensor) -> float:
        if self.rows.world.score == "auc":
            return float(roc_auc_score(labels, (logits[:, 1] - logits[:, 0]).nan_to_num()))
        return float((logits.argmax(1) == labels).float().mean())

    def product(self, promise: Promise, choice: Choice) -> float:
        """Return the score on the test split after the product's own rounds, for one step a round."""
        world, (x, y), (test, labels) = self.rows.world, *(self.of(part, choice.dims) for part in ("train", "test"))
        clients = list(np.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]))
        splits = [
            Split(rows.flatten(0, -2).numpy(), wanted.flatten(), 1.0) for rows, wanted in ((x, y), (test, labels))
        ]
        dataset = replace(self.rows.dataset, train=splits[0], test=splits[1], groups=None)
        head = nn.Linear(x.shape[-1], self.rows.dataset.num_classes, bias=False)
        nn.init.zeros_(head.weight)
        model = nn.Sequential(OrderedDict(fc=head))
        settings: dict[str, Any] = {"rounds": world.rounds, "clients": world.cohort, "epochs": world.epochs}
        settings |= {"lr": choice.lr, "batch_size": choice.batch or None, "aggregator": "fedavgm:momentum=0.9"}
        training = Training(**settings)
        spec = f"veil:{promise.spec or 'z=1e-9'},tier={'local' if promise.local or not promise.spec else 'aggregate'}"
        defense = "none" if not promise.spec and choice.clip == inf else f"{spec},clip={choice.clip}"
        mean = Averaged()
        for last in simulate(model, dataset, clients, training, defense, Seeds(self.seed)):
            if last.number > 0.75 * world.rounds:
                mean.add(last.model)
        mean.into(model)
        with torch.no_grad():
            return self._score(model(test), labels)


RATES, CLIPS = (1.0, 3.0, 10.0, 30.0), (0.1, 0.3, 1.0)
SMALL_RATES = (0.1, 0.3, 1.0, 3.0)  # of batches of 32


def tried(scenes: Sequence[Scene], promise: Promise) -> list[tuple[Choice, float]]:
    """Return what was tried for a row and its mean score on held-out records: rates and clips, then directions."""
    dims = scenes[0].rows.world.dims
    middle, found = dims[len(dims) // 2], list[tuple[Choice, float]]()

    def score(choices: Sequence[Choice]) -> Choice:
        each = [scene.scores(promise, choices, True) for scene in scenes]
        found.extend((choice, fmean(some)) for choice, some in zip(choices, zip(*each, strict=True), strict=True))
        return max(found, key=lambda one: one[1])[0]

    best = score([Choice(lr, clip, middle) for lr in RATES for clip in CLIPS])
    if not promise.z_run:
        best = score([Choice(lr, inf, middle, 32) for lr in SMALL_RATES])
    for width in set(dims) - {middle}:
        score([replace(best, dims=width, lr=best.lr * by) for by in (0.5, 1.0, 2.0)])
    return found


DEFENDED = "veil:promise=reconstruction,tier=aggregate,clip=0.3"


def round_times(rounds: int = 40, records: int = 200, dims: int = 300) -> dict[str, list[float]]:
    """Return milliseconds of processor time of a round on kept features, undefended and defended, and their ratio."""
    found, digits = {}, load("digits", None)
    x = F.normalize(torch.randn(100 * records, dims), dim=1).numpy()
    rows = Split(x, torch.randint(10, (len(x),)), 1.0)
    clients = list(np.arange(len(x)).reshape(100, records))
    head = nn.Sequential(OrderedDict(fc=nn.Linear(dims, 10, bias=False)))
    for engine, cohort in product(("sequential", "vectorised"), (10, 100)):
        training = Training(rounds=rounds, clients=cohort, batch_size=None, lr=1.0, aggregator="fedavgm:momentum=0.9")
        each: dict[str, list[float]] = {"none": [], DEFENDED: []}
        for defense in (*each, *each):
            run = simulate(head, replace(digits, train=rows, test=rows), clients, training, defense, engine=engine)
            began = [time.process_time() for _ in run]
            each[defense] += [1000 * (b - a) for a, b in pairwise(began[5:])]  # less the first, which prepare
        bare, defended = (median(times) for times in each.values())
        found[f"{engine}, {cohort} clients"] = [bare, defended, defended / bare]
    return found


def poisson(epsilons: Sequence[float] = (2.0, 8.0), shares: Sequence[float] = (1.0, 0.25, 0.1)) -> list[list[float]]:
    """Return ε, the share of secret Poisson batches, σ, and the noise of 100 such steps beside their expected sum."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    def spent(sigma: float, share: float) -> float:
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        event = GaussianDpEvent(sigma)
        accountant.compose(event if share == 1 else PoissonSampledDpEvent(share, event), 100)
        return float(accountant.get_epsilon(1e-5))

    found = []
    for epsilon in epsilons:
        for share in shares:
            low, high = 0.3, 60.0
            for _ in range(14):
                middle = sqrt(low * high)
                low, high = (middle, high) if spent(middle, share) > epsilon else (low, middle)
            found.append([epsilon, share, high, high / share])
    return found


def main() -> None:
    """Choose the settings, measure with other seeds, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(WORLDS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--product", type=int, nargs="*", default=[], help="Seeds that the product trains, too.")
    parser.add_argument("--promises", nargs="*", default=[], help="By name; none: all of them.")
    parser.add_argument("--predict", action="store_true", help="Only rehearse the rows that are there.")
    parser.add_argument("--data")
    parser.add_argument("--first", type=int, default=0, help="Training records that are dealt out, from the first.")
    parser.add_argument("--out", type=Path, default=Path("studies/bench/results/cure.json"))
    parser.add_argument("--times", action="store_true", help="Only time a round on kept features.")
    parser.add_argument("--poisson", action="store_true", help="Only say what secret Poisson batches would save.")
    given = parser.parse_args()
    if given.poisson or given.times:
        print(json.dumps(poisson() if given.poisson else round_times()))
        return
    for name in given.only:
        kept = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
        rows = Rows.make(WORLDS[name], given.data, given.first)
        mine = [row for row in kept if row["world"] == name]
        if given.predict:
            scenes = [Scene(rows, seed) for seed in mine[0]["seeds"]]
            for row in filter(lambda one: one["z_run"] and one["score"] == "accuracy", mine):
                row["rehearsed"] = predict(scenes, row, Choice(**mine[0]["choice"]))
                show(row)
        else:
            promises = [p for p in rows.world.promises if not given.promises or p.name in given.promises]
            made = world_rows(rows, promises, given.seeds, given.product)
            names = {row["promise"] for row in made}
            mine = [row for row in mine if row["promise"] not in names] + made
        order = [promise.name for promise in rows.world.promises]
        mine.sort(key=lambda one: order.index(one["promise"]))
        kept = [row for row in kept if row["world"] != name] + mine
        judge(kept)
        given.out.write_text('{"rows": [\n' + ",\n".join(json.dumps(row) for row in kept) + "\n]}\n")


def world_rows(
    rows: Rows, promises: Sequence[Promise], seeds: Sequence[int], trained: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each promise of a world."""
    world, made = rows.world, []
    tuning = [Scene(rows, 1000 + i) for i in range(world.tuning)]
    scenes = {seed: Scene(rows, seed) for seed in (*seeds, *trained)}
    for promise in filter(tuning[0].fits, promises):
        tries = tried(tuning, promise)
        best, held = max(tries, key=lambda one: one[1])
        found = [scenes[seed].scores(promise, [best], False)[0] for seed in seeds]
        row: dict[str, Any] = {"world": world.name, "promise": promise.name, "z_run": promise.z_run}
        row |= {"model": world.model, "spec": promise.spec, "tier": "local" if promise.local else "aggregate"}
        row |= {"split": world.split, "rounds": world.rounds, "cohort": world.cohort, "epochs": world.epochs}
        row |= {"dealt": len(rows.train), "choice": {k: v for k, v in vars(best).items() if v != inf}, "held": held}
        row |= {"tries": [[v if v != inf else None for v in vars(c).values()] + [s] for c, s in tries]}
        row |= {"score": world.score, "seeds": list(seeds), "found": found, "least": promise.least}
        row |= {"aim": promise.aim if promise.z_run else None}
        if trained:
            row["product"] = {str(seed): scenes[seed].product(promise, best) for seed in trained}
        made.append(row)
        show(row)
    return made


def show(row: dict[str, Any]) -> None:
    """Print what a row says."""
    hidden = ("tries", "model", "spec", "split", "dealt", "rounds", "cohort", "epochs", "seeds", "score", "tier", "aim")
    print(json.dumps({key: value for key, value in row.items() if key not in hidden}), flush=True)


def judge(rows: list[dict[str, Any]]) -> None:
    """Say of each row what it lost, seed by seed, beside its world's undefended run."""
    bare = {row["world"]: row["found"] for row in rows if not row["z_run"]}
    for row in rows:
        if row["z_run"] and row["world"] in bare:
            paired = [100 * (a - b) for a, b in zip(bare[row["world"]], row["found"], strict=True)]
            row |= {"lost": fmean(paired)} | judged(paired, row["aim"])


def predict(scenes: Sequence[Scene], row: dict[str, Any], bare: Choice) -> dict[str, Any]:
    """Return what a rehearsal on the first seed's public records says that a row costs, and what it costs.

    Both are beside the undefended run in the same directions; of several epochs each step is a round's.
    """
    world, promise = scenes[0].rows.world, next(p for p in scenes[0].rows.world.promises if p.name == row["promise"])
    choice = Choice(**row["choice"])
    x, y = scenes[0].of("public", choice.dims)
    records, clients = scenes[0].data["train"][1].shape[1], len(scenes[0].clients)
    noise = scenes[0].noise(promise) / (records * sqrt(world.cohort))
    run = HeadRun(world.rounds, world.cohort * records, noise, clients * records, world.epochs, 0.9, 0.25)
    said = rehearse(x, y, scenes[0].rows.dataset.num_classes, run)
    plain = [scene.scores(NONE, [replace(bare, dims=choice.dims)], False)[0] for scene in scenes]
    lost = [100 * (a - b) for a, b in zip(plain, row["found"], strict=True)]
    return vars(said) | {"real": fmean(lost), "held": said.low <= fmean(lost) <= said.high}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
