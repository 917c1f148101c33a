"""What was recovered: reconstructions paired with their originals and measured, and the blind guesses beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from gradveil.metrics.image import fft_error, mse, psnr, ssim
from gradveil.types import Batch

CLOSE = 0.02  # relative distance at which a number counts as recovered


def pair(found: Tensor, truth: Tensor) -> Tensor:
    """Return ``order`` (N,) such that ``found[order]`` lies nearest to ``truth`` in total squared error.

    The optimal assignment, not a greedy one. It favours the attack, as a privacy measure must.
    """
    cost = torch.cdist(truth.flatten(1).double(), found.flatten(1).double()).square()  # (N, N)
    _, order = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(order)


def identification(found: Tensor, truth: Tensor, gallery: Tensor) -> Tensor:
    """Return 1 where a reconstruction is nearer to its original than to every other image: -> (N,).

    ``gallery`` (M, *shape) holds other images of the same kind, so each original stands among M + 1. Nearest in
    mean squared error; a tie counts against the attack. Guessing scores 1 / (M + 1).
    """
    flat = found.flatten(1).double()
    own = (flat - truth.flatten(1).double()).square().sum(dim=1)  # (N,)
    others = (flat[:, None] - gallery.flatten(1).double()[None]).square().sum(dim=2)  # (N, M)
    return (own[:, None] < others).all(dim=1).float()


def label_accuracy(found: Tensor, truth: Tensor) -> Tensor:
    """Return 1 for each true label (N, ...) that is among the labels found, each found label used once: -> (N,).

    The order is disregarded: an update does not tell in which order its examples came. Of several labels all must be
    right, and numbers to ``CLOSE``.
    """
    left, true = (y.detach().cpu().double().reshape(len(y), -1) for y in (found, truth))
    allowed = CLOSE if truth.is_floating_point() or found.is_floating_point() else 0.0
    hits = torch.zeros(len(truth))
    for i, label in enumerate(true):
        apart = (left - label).norm(dim=1)
        if len(left) and float(apart.min()) <= allowed * (float(label.norm()) or 1.0):
            left = left[torch.arange(len(left)) != apart.argmin()]
            hits[i] = 1.0
    return hits


@dataclass(frozen=True)
class Metric:
    """A function (found, truth) -> (N,): one value per example, no reduction inside."""

    name: str
    function: Callable[..., Tensor]  # (found, truth); `identification` takes the gallery as well
    better: Literal["lower", "higher"]  # for the attacker
    description: str
    is_rate: bool = False  # values are 0 or 1, and their mean is a share


# LPIPS is left out: its weights are a download of a network trained on other data, and none come with the package.
METRICS: dict[str, Metric] = {
    m.name: m
    for m in (
        Metric("mse", mse, "lower", "Mean squared error per pixel, pixels in [0, 1]."),
        Metric("psnr", psnr, "higher", "Peak signal-to-noise ratio in dB, at most 120."),
        Metric("ssim", ssim, "higher", "Structural similarity; a smaller window on images under 13 pixels."),
        Metric("fft", fft_error, "lower", "Squared error between magnitude spectra: texture, wherever it lies."),
        Metric("label", label_accuracy, "higher", "Share of the labels that were recovered, in any order.", True),
        Metric("identified", identification, "higher", "Picks its original out of a gallery of 100 images.", True),
    )
}


def measure(
    found: Tensor,
    labels: Tensor | None,
    truth: Batch,
    gallery: Tensor | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every metric by name, each (N,), and the reconstruction (N, *shape) as it was measured.

    First clamped to the data range and scaled to [0, 1] (what is not a number becomes mid-grey), then paired
    with the originals by optimal assignment. Without ``labels`` or ``gallery`` those metrics are NaN.
    """
    truth_unit = _unit(truth.inputs, bounds)
    unit = _unit(found, bounds)
    unit = unit[pair(unit, truth_unit)]
    unknown = torch.full((len(truth),), torch.nan)
    values = {name: METRICS[name].function(unit, truth_unit) for name in ("mse", "psnr", "ssim", "fft")}
    values["label"] = unknown if labels is None else label_accuracy(labels, truth.labels)
    values["identified"] = unknown if gallery is None else identification(unit, truth_unit, _unit(gallery, bounds))
    return values, unit


def _unit(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    scaled = (x.detach().cpu().float() - low) / (high - low)
    return scaled.nan_to_num(nan=0.5, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)


# Blind guesses: what somebody who never saw the update would answer. The floor under every attack.


def blind_guesses(truth: Batch, public: Batch | None, bounds: tuple[float, float] = (0.0, 1.0)) -> dict[str, Tensor]:
    """Return every blind guess (N, *shape) by name; ``public`` is data of the same kind that is not the client's.

    *grey*: half-way between black and white everywhere. *mean image*: of the public images. *class mean*: of those of
    the right class, the mean image where there are none; for a server that knows the label, and no more. Not where
    labels are no classes.
    """
    guesses = {"grey": torch.full_like(truth.inputs, sum(bounds) / 2)}
    if public is not None:
        guesses["mean image"] = public.inputs.mean(dim=0).expand_as(truth.inputs)
        if truth.labels.ndim == 1 and not truth.labels.is_floating_point():
            guesses["class mean"] = _class_means(truth, public)
    return guesses


def _class_means(truth: Batch, public: Batch) -> Tensor:
    means = {}
    for label in set(truth.labels.tolist()):
        of_class = public.inputs[public.labels == label]
        means[label] = (of_class if len(of_class) else public.inputs).mean(dim=0)
    return torch.stack([means[label] for label in truth.labels.tolist()])
