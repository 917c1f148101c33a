"""Which rows of the last layer's gradient belong to classes on the device: four rules, none told how many there are."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["gap", "mean", "bias_sign", "row_sum"]
Peaks = tuple[Tensor, Tensor]  # present (D, K) bool, confidence (D, K) in [0, 1]


def gap(rows: Tensor, bias: Tensor | None) -> Peaks:
    """Sort the row norms and cut at the largest gap (Sun et al. 2020, algorithm 3, read literally)."""
    norms = rows.norm(dim=2)  # (D, K)
    ordered = norms.sort(dim=1, descending=True).values
    at = (ordered[:, :-1] - ordered[:, 1:]).argmax(1, keepdim=True)
    threshold = (ordered.gather(1, at) + ordered.gather(1, at + 1)) / 2
    return _above(norms, threshold)


def mean(rows: Tensor, bias: Tensor | None) -> Peaks:
    """Take the rows whose norm is above the mean norm."""
    norms = rows.norm(dim=2)
    return _above(norms, norms.mean(1, keepdim=True))


def row_sum(rows: Tensor, bias: Tensor | None) -> Peaks:
    """Take the rows with a negative sum: only a class on the device has p - 1 in it. For representations above zero."""
    return _above(-rows.sum(2), rows.new_zeros(len(rows), 1))


def bias_sign(rows: Tensor, bias: Tensor | None) -> Peaks:
    """Take the classes with a negative bias gradient, mean (p - y); without a bias, by the rows' sums."""
    return row_sum(rows, None) if bias is None else _above(-bias, bias.new_zeros(len(bias), 1))


RULES: dict[Rule, Callable[[Tensor, Tensor | None], Peaks]] = {
    "gap": gap,
    "mean": mean,
    "bias_sign": bias_sign,
    "row_sum": row_sum,
}


def _above(score: Tensor, threshold: Tensor) -> Peaks:
    """Return what is above the threshold, and each distance from it as a share of the largest on its side."""
    distance = score - threshold
    tiny = torch.finfo(score.dtype).tiny
    up = distance.clamp_min(0) / distance.amax(1, keepdim=True).clamp_min(tiny)
    down = (-distance).clamp_min(0) / (-distance).amax(1, keepdim=True).clamp_min(tiny)
    return distance > 0, up + down
