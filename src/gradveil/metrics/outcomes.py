"""How good predictions are on held-out examples, beside predictions that look at no input."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
