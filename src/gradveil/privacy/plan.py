"""From a promise and a planned run to the noise that keeps it, and what that noise is expected to cost.

A rehearsal says it of a linear head, without a look at a private record. Features of public records, with their labels,
give one Gaussian a class with a common covariance; records drawn from it train the head as the run will, with its noise
and without. A few hundred public records would be learnt by heart, and noise then helps; drawn ones are as many as the
run has. They are easier to tell apart than real ones: on digits real runs lost 2 to 4 points more than was said
(``studies/bench/rehearsals.py``), so the cost is a lower estimate.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Literal

import torch
from scipy.stats import t as student
from torch import Generator, Tensor
from torch.nn import functional as F

from gradveil import pace
from gradveil.errors import CertificateError
from gradveil.privacy.accountant import Account
from gradveil.privacy.bounds import mu_of
from gradveil.types import Batch

Tier = Literal["local", "aggregate"]

# Multipliers of a whole run, by what they were measured to stop: a server that seeks the picture gets no nearer than
# the best blind guess; one with 100 candidates picks the right one hardly more often than by chance.
PROMISES = {"reconstruction": 0.5, "identification": 1.0}

# The noise in the mean of a round beside the largest mean that clipped gradients can have: up to here training lost
# two points of accuracy or less, on LeNet and on fixed features, on MNIST and CIFAR-10 (docs/research/veil.md). Fixed
# features on MNIST lost one at twice that.
TWO_POINTS = 0.06


@dataclass(frozen=True)
class PlannedRun:
    """A federated run as it is planned: how often a record's gradient is released, and among how many."""

    records: int  # of a client
    batch_size: int | None  # slots of a local step; None: all records in one
    epochs: int
    rounds: int
    participations: int  # the most rounds that one client takes part in
    cohort: int  # clients of a round
    lost: float = 0.0  # share of the cohort that may drop out of a round
    colluding: float = 0.0  # share of the cohort that may tell the server its noise

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("records", "epochs", "rounds", "participations", "cohort")}
        for name, value in (counts | {"batch_size": self.slots}).items():
            if value < 1:
                raise CertificateError(f"{name}={value}: a run needs at least one.")
        if self.participations > self.rounds:
            raise CertificateError(
                f"participations={self.participations} exceed rounds={self.rounds}: a client takes part at most once "
                "in a round."
            )
        if not (self.lost >= 0 and self.colluding >= 0 and self.lost + self.colluding < 1):
            raise CertificateError(
                f"lost={self.lost}, colluding={self.colluding}: give shares of the cohort that leave some of it."
            )

    @property
    def slots(self) -> int:
        """The fixed number of records that a step is divided by."""
        return self.records if self.batch_size is None else min(self.batch_size, self.records)

    @property
    def steps(self) -> int:
        return self.epochs * ceil(self.records / self.slots)

    @property
    def uses(self) -> int:
        """How often a record is used over the whole run: once in each local epoch."""
        return self.epochs * self.participations

    @property
    def stay(self) -> float:
        """The number of clients that are sure to be in a round's sum."""
        return self.cohort * (1 - self.lost)

    @property
    def honest(self) -> float:
        """The number of clients whose noise is in the sum and secret."""
        return self.cohort * (1 - self.lost - self.colluding)

    @property
    def min_clients(self) -> int:
        return ceil(self.stay - 1e-9)

    def z(self, z_run: float) -> float:
        """Return the multiplier of a release that makes this one of the whole run."""
        return z_run * sqrt(self.uses)

    def check_tier(self, tier: Tier) -> None:
        """Raise where secure aggregation would hide nothing, or less than it seems to."""
        if tier != "aggregate":
            return
        if self.honest < 2:
            raise CertificateError(
                f"tier=aggregate with a cohort of {self.cohort} ({self.honest:.3g} of them counted on): a sum of one "
                "hides nothing. Take a larger cohort, or tier=local."
            )
        if self.steps > 1:
            raise CertificateError(
                f"tier=aggregate allows one noisy release a round, and a round here has {self.steps} local steps: "
                "later steps would lean on the client's own part of the noise alone. Give epochs=1 and all records in "
                "one batch, or tier=local."
            )


def z_run_of(
    promise: str | None = None, epsilon: float | None = None, delta: float | None = None, rho: float | None = None
) -> float:
    """Return the multiplier of the whole run that keeps a promise; give one of promise, epsilon with delta, rho."""
    if sum(given is not None for given in (promise, epsilon, rho)) != 1:
        raise CertificateError(
            "Give one promise: promise=reconstruction|identification, epsilon= with delta=, or rho=."
        )
    if promise is not None:
        if promise not in PROMISES:
            raise CertificateError(f"promise={promise!r} is not known. Give one of: {', '.join(PROMISES)}.")
        return PROMISES[promise]
    if epsilon is not None:
        return 1 / mu_of(epsilon, 1e-5 if delta is None else delta)
    if rho is None or not (rho > 0 and isfinite(rho)):
        raise CertificateError(f"rho={rho}: give a number above 0.")
    return 1 / sqrt(2 * rho)


@dataclass(frozen=True)
class Plan:
    """What a multiplier buys over a planned run, and what it is expected to cost."""

    run: PlannedRun
    z: float  # of a release
    tier: Tier = "local"
    parameters: int | None = None  # of the model

    def __post_init__(self) -> None:
        if not (self.z > 0 and isfinite(self.z)):
            raise CertificateError(f"z={self.z}: the noise multiplier must be above 0.")
        if self.parameters is not None and self.parameters < 1:
            raise CertificateError(f"parameters={self.parameters}: a model has at least one.")
        self.run.check_tier(self.tier)

    @property
    def account(self) -> Account:
        """The account of a client that has taken part as often as it may."""
        return Account("plan", spent=self.run.uses / self.z**2)

    @property
    def client_z(self) -> float:
        return self.z if self.tier == "local" else self.z / sqrt(self.run.honest)

    @property
    def noise_to_signal(self) -> float | None:
        """The noise in the mean of a round's step beside the largest mean that clipped gradients can have.

        In the mean is the noise of those who stay, colluding or not: fewer clients, less noise, and a larger share of
        each. It is that of a round in which all leave that may.
        """
        if self.parameters is None:
            return None
        return self.client_z * sqrt(self.parameters) / (self.run.slots * sqrt(self.run.stay))

    @property
    def cheap_from(self) -> int | None:
        """The cohort from which on the noise is expected to cost less than two points, all else equal."""
        ratio = self.noise_to_signal
        if ratio is None:
            return None
        excess = ratio / TWO_POINTS
        least = 1 if self.tier == "local" else 2 * self.run.cohort / self.run.honest  # secure aggregation needs two
        return ceil(max(least, self.run.cohort * (excess**2 if self.tier == "local" else excess)) - 1e-9)


def floor_share(account: Account, spectra: Iterable[Tensor]) -> float:
    """Return the floor for Gaussian images, as a share of the blind guess's error; a spectrum for each class.

    It is no bound for other images: a server that knows the record to be one of two gets far below it.
    """
    spectra = list(spectra)
    whole = sum(float(values.sum()) for values in spectra)
    return sum(account.floor(values) for values in spectra) / whole if whole else inf


def class_spectra(public: Batch) -> dict[int, Tensor]:
    """Return the eigenvalues of the covariance of public inputs, class by class; of all where there are no classes."""
    labels = public.labels
    inputs = public.inputs.flatten(1).double().cpu()
    if labels.ndim > 1 or labels.is_floating_point():
        labels = torch.zeros(len(inputs), dtype=torch.int64)
    found = {}
    classes = labels.unique().tolist()
    for done, label in enumerate(classes):
        pace.step(done, len(classes))
        mine = inputs[labels.cpu() == label]
        if len(mine) > 1:
            spread = torch.linalg.svdvals(mine - mine.mean(0))
            found[int(label)] = spread.square() / (len(mine) - 1)
    return found


RATES, CLIPS = (0.3, 1.0, 3.0, 10.0, 30.0), (0.1, 0.3, 0.6)
TESTED = 4000  # drawn records that accuracy is measured on
MOST, POPULATION = 2000, 20_000  # drawn records of a step and of a run, at most: more say nothing new
TRIALS = 8


@dataclass(frozen=True)
class HeadRun:
    """What of a run its head's training hangs on."""

    rounds: int
    records: int  # of all clients in a step
    noise: float  # deviation in the mean gradient of a step, in clips
    population: int  # records of all clients of the run
    steps: int = 1  # local ones, of a round
    momentum: float = 0.0  # of the server
    tail: float = 0.0  # share of the rounds over which the weights are averaged; 0: the last round's


@dataclass(frozen=True)
class Rehearsal:
    """What was chosen, and the points of accuracy that it costs on drawn records, with a 95 % interval of them."""

    lr: float
    clip: float
    lost: float
    low: float
    high: float
    accuracy: float  # on drawn records, with the noise


def rehearse(
    features: Tensor,
    labels: Tensor,
    kinds: int,
    run: HeadRun,
    seed: int = 0,
    rates: Sequence[float] = RATES,
    clips: Sequence[float] = CLIPS,
) -> Rehearsal:
    """Return the best of the rates and clips, chosen on one drawing, and its cost on others.

    ``features`` (N, D) are what enters the head, with the public records' classes (N,). The run without a defence may
    choose among all rates, and clip as well.
    """
    if len(torch.unique(labels)) < kinds or len(features) < 10 * kinds:
        raise CertificateError(
            f"A rehearsal needs public records of every class, ten of each on average; there are {len(features)} of "
            f"{len(torch.unique(labels))} of the {kinds} classes. Give lr and clip yourself."
        )
    tries = list(product(rates, clips))
    free = [(lr, clip) for lr in RATES for clip in (0.3, inf)]
    plain = replace(run, noise=0.0)
    mine, bare = (_accuracies(features, labels, kinds, *what, seed) for what in ((run, tries), (plain, free)))
    lr, clip = tries[max(range(len(tries)), key=mine.__getitem__)]
    best = free[max(range(len(free)), key=bare.__getitem__)]
    lost, reached = [], []
    for trial in range(1, TRIALS + 1):
        some = torch.randint(len(labels), labels.shape, generator=torch.Generator().manual_seed(seed + trial))
        again = features[some], labels[some]  # other public records might have been there
        with_noise = _accuracies(*again, kinds, run, [(lr, clip)], seed + trial)[0]
        lost.append(100 * (_accuracies(*again, kinds, plain, [best], seed + trial)[0] - with_noise))
        reached.append(with_noise)
    reach = float(student.ppf(0.975, TRIALS - 1)) * stdev(lost) * sqrt(1 + 1 / TRIALS)
    middle = fmean(lost)
    return Rehearsal(lr, clip, middle, middle - reach, middle + reach, fmean(reached))


def _accuracies(
    features: Tensor, labels: Tensor, kinds: int, run: HeadRun, tries: Sequence[tuple[float, float]], seed: int
) -> list[float]:
    """Train a head with each rate and clip side by side, on the same drawn records, and return their accuracies."""
    rng, own = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))  # records and noise apart
    drawn = _Drawn(features, labels, kinds)
    tested, truth = drawn.some(TESTED, rng)
    lr, clip = (torch.tensor(values).view(-1, 1, 1) for values in zip(*tries, strict=True))
    weights = torch.zeros(len(tries), kinds, features.shape[1])
    speed, mean, count = torch.zeros_like(weights), torch.zeros_like(weights), 0
    for number, (x, y) in enumerate(drawn.batches(run, rng), 1):
        moved = torch.zeros_like(weights)
        for _ in range(run.steps):
            logits = (x @ (weights - lr * moved).flatten(0, 1).T).view(len(x), len(tries), kinds)
            delta = logits.softmax(2) - F.one_hot(y, kinds)[:, None]
            delta = delta * (clip.view(1, -1, 1) / delta.norm(dim=2, keepdim=True).clamp_min(1e-30)).clamp_max(1.0)
            found = (delta.flatten(1).T @ x).view_as(weights) / len(x)
            if run.noise:
                found = found + clip * run.noise * torch.randn(weights.shape[1:], generator=own)
            moved = moved + found
        speed = run.momentum * speed + moved
        weights = weights - lr * speed
        if number > (1 - run.tail) * run.rounds or number == run.rounds:
            mean, count = mean + weights, count + 1
    return [float(((tested @ (one / count).T).argmax(1) == truth).float().mean()) for one in mean]


class _Drawn:
    """Records like the public ones: class means, pulled together as far as their own error had spread them."""

    def __init__(self, features: Tensor, labels: Tensor, kinds: int) -> None:
        counts = torch.bincount(labels, minlength=kinds).clamp_min(1)
        middle = features.mean(0)
        means = torch.stack([features[labels == k].mean(0) if (labels == k).any() else middle for k in range(kinds)])
        rest = (features - means[labels]).double()
        spread = rest.T @ rest / max(1, len(rest) - kinds)
        spread += 1e-4 * spread.trace() / len(spread) * torch.eye(len(spread), dtype=torch.float64)
        self.root = torch.linalg.cholesky(spread)
        apart = torch.linalg.solve_triangular(self.root, (means - middle).double().T, upper=False).T
        lengths = apart.square().sum(1)
        keep = (1 - apart.shape[1] / counts / lengths).clamp_min(0).sqrt()
        self.means = middle + (apart * keep[:, None] @ self.root.T).float()
        self.root, self.shares = self.root.float(), counts / counts.sum()

    def some(self, count: int, rng: Generator) -> tuple[Tensor, Tensor]:
        labels = torch.multinomial(self.shares, count, True, generator=rng)
        x = self.means[labels] + torch.randn(count, len(self.root), generator=rng) @ self.root.T
        return F.normalize(x, dim=1), labels

    def batches(self, run: HeadRun, rng: Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the records of each round, of one population."""
        x, y = self.some(min(run.population, POPULATION), rng)
        for _ in range(run.rounds):
            some = torch.randperm(len(y), generator=rng)[: min(run.records, MOST)]
            yield x[some], y[some]
