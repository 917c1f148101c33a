"""Distances between reconstruction and original, blind guesses as floors, intervals over examples; how good predictions
are, beside those that look at no input; and how well inferred representations fit the true ones.

Plain correlation of a representation with that of its own class (``own``) mostly measures what all classes share. So
beside it: correlation with the other classes on the same device (``wrong``), whether the inferred vector is nearest to
its own class (``nearest``), and the correlation that is left once the mean over the device's classes is removed
(``centred``).
"""

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def outcome(output: Tensor, target: Tensor, known: Tensor | None = None) -> ClassOutcome | NumberOutcome | None:
    """Return how good outputs (N, ...) are for targets (N, ...); None for targets that are neither.

    ``known`` are the targets to train on, which say what the most frequent class and the mean are; without them those
    of the held-out examples do, a better blind guess than anybody could make.
    """
    known = target if known is None else known
    if target.is_floating_point():
        found, true = output.detach().double().reshape(len(target), -1), target.double().reshape(len(target), -1)
        mean = known.double().reshape(len(known), -1).mean(0)
        left, spread = (found - true).square().sum(), (true - mean).square().sum().clamp_min(1e-300)
        return NumberOutcome(
            float(1 - left / spread), float((found - true).abs().mean()), float((mean - true).abs().mean())
        )
    if target.ndim != 1 or output.ndim != 2:
        return None
    if output.shape[1] == 1:  # one logit, of yes
        output = torch.cat([torch.zeros_like(output), output], 1)
    if max(int(target.max()), int(known.max())) >= output.shape[1]:
        return None
    chances, hits = output.detach().double().softmax(1).cpu(), (output.argmax(1) == target).double().cpu()
    target, most = target.cpu(), int(torch.bincount(known.cpu()).argmax())
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


CONTROLS = ("own", "wrong", "nearest", "centred")


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the Pearson correlation along the last dimension; 0 where a vector is constant."""
    return (_standard(a) * _standard(b)).sum(-1)


def representation_scores(found: Tensor, truth: Tensor, present: Tensor) -> dict[str, Tensor]:
    """Return each control per device and class (D, K), NaN where it does not exist.

    ``found`` and ``truth`` are (D, K, L), ``present`` (D, K) says which classes the device truly holds. ``wrong``,
    ``nearest`` and ``centred`` need a second class on the device.
    """
    f, t = _standard(found), _standard(truth)
    every = f @ t.mT  # (D, K, K): found class against true class
    own = every.diagonal(dim1=1, dim2=2)
    others = present[:, None, :] & ~torch.eye(f.shape[1], dtype=torch.bool, device=f.device)
    count = others.sum(2)
    wrong = (every * others).sum(2) / count
    best = every.masked_fill(~others, -torch.inf).amax(2)
    centred = correlation(_centred(f, present), _centred(t, present))
    enough = present & (count > 0)
    absent = torch.full_like(own, torch.nan)
    values = {"own": (own, present), "wrong": (wrong, enough), "nearest": ((own > best).to(own), enough)}
    values["centred"] = (centred, enough)
    return {name: torch.where(where, value, absent) for name, (value, where) in values.items()}


def class_set_accuracy(inferred: Tensor, present: Tensor) -> Tensor:
    """Return 1.0 for each device (D,) whose class set (D, K) was inferred exactly, else 0.0."""
    return (inferred == present).all(1).float()


def class_means(
    model: nn.Module, layers: Sequence[str], inputs: Tensor, groups: Tensor, num_groups: int
) -> dict[str, Tensor]:
    """Return the mean input of each layer over the examples of each group, layer -> (num_groups, L).

    A group is a class, or a class on a device: one forward pass serves many devices. A convolution's input is
    averaged over its positions too: the mean patch (channels · height · width of the kernel).
    """
    caught: dict[str, Tensor] = {}

    def catch(path: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            means = _group_means(args[0], groups, num_groups)
            caught[path] = mean_patch(layer, means) if isinstance(layer, nn.Conv2d) else means.flatten(1)

        return hook

    modes = {module: module.training for module in model.modules()}
    with ExitStack() as stack, torch.no_grad():
        for path in layers:
            stack.enter_context(model.get_submodule(path).register_forward_pre_hook(catch(path)))
        for module, training in modes.items():
            stack.callback(setattr, module, "training", training)
        model.eval()(inputs)
    return {path: caught[path] for path in layers}


def mean_patch(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Return the mean over positions of the patches that a convolution sees, (N, channels · kernel)."""
    if isinstance(layer.padding, str) or layer.stride != (1, 1) or layer.dilation != (1, 1):
        return F.unfold(x, layer.kernel_size, layer.dilation, _padding(layer), layer.stride).mean(2)
    top, left = layer.padding
    padded = F.pad(x, (left, left, top, top))
    positions = [n - k + 1 for n, k in zip(padded.shape[2:], layer.kernel_size, strict=True)]
    # Entry (i, j) of the mean patch is the mean over a window of all positions that starts at (i, j).
    return F.avg_pool2d(padded, positions, stride=1).flatten(1)


def _padding(layer: nn.Conv2d) -> tuple[int, int]:
    """Return the padding in numbers; ``same`` as torch pads odd kernels."""
    if isinstance(layer.padding, str):
        high, wide = (d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        return (high, wide) if layer.padding == "same" else (0, 0)
    return layer.padding[0], layer.padding[1]


def _group_means(r: Tensor, groups: Tensor, count: int) -> Tensor:
    """Return the mean of r (N, ...) over each group, (count, ...); 0 for an empty group."""
    sums = torch.zeros(count, *r.shape[1:], dtype=r.dtype, device=r.device).index_add_(0, groups, r)
    sizes = torch.bincount(groups, minlength=count).clamp_min(1)
    return sums / sizes.reshape(-1, *[1] * (r.ndim - 1))


def _standard(v: Tensor) -> Tensor:
    """Return the vectors with mean 0 and length 1 along the last dimension; 0 where constant."""
    away = v - v.mean(-1, keepdim=True)
    length = away.norm(dim=-1, keepdim=True)
    # Rounding leaves a constant vector with a length that is tiny beside its entries.
    flat = length <= 1e-6 * v.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    return torch.where(flat, 0.0, away / length.where(~flat, torch.ones_like(length)))


def _centred(v: Tensor, present: Tensor) -> Tensor:
    """Return the vectors (D, K, L) less their mean over the classes that are present."""
    weight = present.to(v)[..., None]
    return v - (v * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
