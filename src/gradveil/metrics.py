"""Distances between reconstruction and original, blind guesses as floors, intervals over examples; and how good
predictions are, beside those that look at no input.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from gradveil.modalities import IMAGE, Metric, Modality
from gradveil.modalities.base import by_name, identification, label_accuracy
from gradveil.types import Batch


@dataclass(frozen=True)
class Interval:
    """A mean over ``count`` examples and an interval that covers it at the named level.

    It writes itself: ``f"{x}"`` is ``0.0012 [0.0011, 0.0014]`` in two digits, ``f"{x:.4f}"`` and ``f"{x:.0%}"`` use
    that form for all three numbers. Without examples it is a dash.
    """

    mean: float
    low: float
    high: float
    count: int

    def __format__(self, form: str) -> str:
        if not self.count or math.isnan(self.mean):
            return "–"
        mean, low, high = (f"{v:{form}}" if form else short(v) for v in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)

    @property
    def hits(self) -> int:
        return round(self.mean * self.count)

    @property
    def as_count(self) -> str:
        """A share as a count, with its interval in percent: ``3/8 [14%, 69%]``."""
        return f"{self.hits}/{self.count} [{self.low:.0%}, {self.high:.0%}]" if self.count else "–"


def short(value: float) -> str:
    """Return a number in two digits, without the zeros that pad an exponent (``9.6e-9``)."""
    return re.sub(r"e([+-])0+", r"e\1", f"{value:.2g}")


def interval(values: Sequence[float], level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """Return the mean with a bootstrap percentile interval over the examples; NaN values are left out.

    With one example the interval is that value: there is nothing to resample, and ``count`` says so.
    """
    return _resampled(tuple(values), level, draws, seed)


@lru_cache(maxsize=4096)  # tables, verdicts and figures ask for the same ones
def _resampled(values: tuple[float, ...], level: float, draws: int, seed: int) -> Interval:
    x = np.asarray(values, dtype=float)
    x = x[~np.isnan(x)]
    if len(x) == 0:
        return Interval(np.nan, np.nan, np.nan, 0)
    picks = np.random.default_rng(seed).integers(len(x), size=(draws, len(x)))
    low, high = np.quantile(x[picks].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(x.mean()), float(low), float(high), len(x))


def rate(hits: Sequence[float]) -> Interval:
    """Return a share of examples (values 0 or 1) with its 95 % Wilson interval; NaN values are left out.

    A bootstrap of eight misses would say "0, surely"; Wilson says up to 0.32.
    """
    x = np.asarray(hits, dtype=float)
    x = x[~np.isnan(x)]
    if len(x) == 0:
        return Interval(np.nan, np.nan, np.nan, 0)
    n, p, z = len(x), float(x.mean()), NormalDist().inv_cdf(0.975)
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return Interval(p, max(0.0, low), min(1.0, high), n)


def chance_of(hits: int, count: int, rate: float) -> float:
    """Return how likely at least so many hits are by chance alone: the upper tail of a binomial distribution."""
    return math.fsum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(hits, count + 1))


COMMON: dict[str, Metric] = by_name(  # of every modality
    Metric("label", label_accuracy, "higher", "Share of the labels that were recovered, in any order.", True),
    Metric("identified", identification, "higher", "Picks its original out of a gallery of 100 examples.", True),
)
METRICS: dict[str, Metric] = {**IMAGE.metrics, **COMMON}


def measure(
    found: Tensor,
    labels: Tensor | None,
    truth: Batch,
    gallery: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    modality: Modality = IMAGE,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every metric by name, each (N,), and the reconstruction (N, *shape) as it was measured.

    First made an example of its kind (pixels are clamped to the data range and scaled to [0, 1]), then paired with the
    originals by optimal assignment. Without ``labels`` or ``gallery`` those metrics are NaN.
    """
    values, shown = modality.measure(found, truth.inputs, gallery, bounds)
    unknown = torch.full((len(truth),), torch.nan)
    values["label"] = unknown if labels is None else label_accuracy(labels, truth.labels)
    return values, shown


# Blind guesses: what somebody who never saw the update would answer. The floor under every attack.


def blind_guesses(
    truth: Batch, public: Batch | None, bounds: tuple[float, float] = (0.0, 1.0), modality: Modality = IMAGE
) -> dict[str, Tensor]:
    """Return every blind guess (N, *shape) by name; ``public`` is data of the same kind that is not the client's.

    For images: *grey*, half-way between black and white everywhere; *mean image*, of the public images; *class mean*,
    of those of the right class, the mean image where there are none: for a server that knows the label, and no more.
    The last not where labels are no classes.
    """
    nothing, whole, own = modality.guesses
    guesses = {nothing: modality.ignorant(truth.inputs, bounds)}
    if public is not None:
        guesses[whole] = modality.typical(public.inputs).expand_as(truth.inputs)
        if truth.labels.ndim == 1 and not truth.labels.is_floating_point():
            guesses[own] = _by_class(truth, public, modality)
    return guesses


def _by_class(truth: Batch, public: Batch, modality: Modality) -> Tensor:
    guesses = {}
    for label in set(truth.labels.tolist()):
        of_class = public.inputs[public.labels == label]
        guesses[label] = modality.typical(of_class if len(of_class) else public.inputs)
    return torch.stack([guesses[label] for label in truth.labels.tolist()])


NAMED = 4  # classes whose recall is said
RANKED = 20  # classes up to which there is an AUC


@dataclass(frozen=True)
class ClassOutcome:
    """Of classes: every figure is a share; the AUC is the mean over classes of each against the rest."""

    accuracy: float
    majority: float  # accuracy of always answering with the most frequent class
    most_frequent: int
    balanced: float  # the mean recall of the classes that are there
    auc: float  # 0.5 by chance; NaN where one class alone is there, or too many are
    recall: tuple[float, ...]  # of each class; NaN where none is there

    def line(self, names: Sequence[str] = ()) -> str:
        called = names or tuple(map(str, range(len(self.recall))))
        told = [
            f"accuracy {self.accuracy:.1%} (always {called[self.most_frequent]!r}: {self.majority:.1%})",
            f"balanced {self.balanced:.1%}",
        ]
        if not math.isnan(self.auc):
            told.append(f"AUC {self.auc:.2f}")
        if len(self.recall) <= NAMED:
            told.append("recall " + ", ".join(f"{n} {r:.1%}" for n, r in zip(called, self.recall, strict=False)))
        return ", ".join(told)


@dataclass(frozen=True)
class NumberOutcome:
    """Of numbers: the share of the variance explained, and the mean distance beside that of answering with the mean."""

    explained: float  # R²: 1 is exact, 0 is no better than the mean, and less is worse
    error: float  # mean absolute
    mean_error: float  # of always answering with the mean

    def line(self, names: Sequence[str] = ()) -> str:
        return f"R² {self.explained:.2f}, mean distance {self.error:.3g} (always the mean: {self.mean_error:.3g})"


def outcome(output: Tensor, target: Tensor) -> ClassOutcome | NumberOutcome | None:
    """Return how good outputs (N, ...) are for targets (N, ...); None for targets that are neither.

    The most frequent class and the mean are those of the targets: a better blind guess than anybody could make.
    """
    if target.is_floating_point():
        found, true = output.detach().double().reshape(len(target), -1), target.double().reshape(len(target), -1)
        mean = true.mean(0)
        left, spread = (found - true).square().sum(), (true - mean).square().sum().clamp_min(1e-300)
        return NumberOutcome(
            float(1 - left / spread), float((found - true).abs().mean()), float((mean - true).abs().mean())
        )
    if target.ndim != 1 or output.ndim != 2:
        return None
    if output.shape[1] == 1:  # one logit, of yes
        output = torch.cat([torch.zeros_like(output), output], 1)
    if int(target.max()) >= output.shape[1]:
        return None
    chances, hits = output.detach().double().softmax(1).cpu(), (output.argmax(1) == target).double().cpu()
    target = target.cpu()
    most = int(torch.bincount(target).argmax())
    there = [target == k for k in range(output.shape[1])]
    recall = tuple(float(hits[its].mean()) for its in there)  # NaN where there are none
    ranked = [auc(chances[:, k], its) for k, its in enumerate(there)] if len(there) <= RANKED else [math.nan]
    areas = torch.tensor(ranked, dtype=torch.float64)
    return ClassOutcome(
        float(hits.mean()), float((target == most).double().mean()), most,
        float(torch.tensor(recall).nanmean()), float(areas.nanmean()), recall,
    )  # fmt: skip


def auc(scores: Tensor, hits: Tensor) -> float:
    """Return the chance that a hit has a higher score than a miss, a tie counting half; NaN without both."""
    from scipy.stats import rankdata

    some, others = int(hits.sum()), int((~hits).sum())
    if not some or not others:
        return float("nan")
    ranks = torch.from_numpy(rankdata(scores.numpy()))
    return float((ranks[hits].sum() - some * (some + 1) / 2) / (some * others))
