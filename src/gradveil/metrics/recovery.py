"""What was recovered: reconstructions paired with their originals and measured, blind guesses, how sure a mean is."""

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
from gradveil.modalities.base import identification, label_accuracy
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


def rate(hits: Sequence[float], level: float = 0.95) -> Interval:
    """Return a share of examples (values 0 or 1) with its Wilson interval; NaN values are left out.

    A bootstrap of eight misses would say "0, surely"; Wilson says up to 0.32.
    """
    x = np.asarray(hits, dtype=float)
    x = x[~np.isnan(x)]
    if len(x) == 0:
        return Interval(np.nan, np.nan, np.nan, 0)
    n, p, z = len(x), float(x.mean()), NormalDist().inv_cdf((1 + level) / 2)
    middle, half = p + z**2 / (2 * n), z * math.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    low, high = (middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)
    return Interval(p, max(0.0, low), min(1.0, high), n)


def chance_of(hits: int, count: int, rate: float) -> float:
    """Return how likely at least so many hits are by chance alone: the upper tail of a binomial distribution."""
    return math.fsum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(hits, count + 1))


COMMON: dict[str, Metric] = {  # of every modality
    m.name: m
    for m in (
        Metric("label", label_accuracy, "higher", "Share of the labels that were recovered, in any order.", True),
        Metric("identified", identification, "higher", "Picks its original out of a gallery of 100 examples.", True),
    )
}
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
