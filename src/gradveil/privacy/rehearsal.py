"""A run rehearsed on public data: the rate and the clip of a linear head, and the accuracy that a promise will cost.

No private record is looked at. Features of public records, with their labels, give one Gaussian a class with a common
covariance; records drawn from it train the head as the run will, with its noise and without. A few hundred public
records would be learnt by heart, and noise then helps; drawn ones are as many as the run has. They are easier to tell
apart than real ones: on digits real runs lost 2 to 4 points more than was said (``studies/bench/rehearsals.py``), so
the cost is a lower estimate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, sqrt
from statistics import fmean, stdev

import torch
from scipy.stats import t as student
from torch import Generator, Tensor
from torch.nn import functional as F

from gradveil.errors import CertificateError

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
    features: Tensor,
    labels: Tensor,
    kinds: int,
    run: HeadRun,
    tries: Sequence[tuple[float, float]],
    seed: int,
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
