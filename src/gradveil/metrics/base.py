"""The metrics by name, and ``measure``: all of them on one reconstruction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradveil.metrics.identify import identification, label_accuracy
from gradveil.metrics.pairing import pair
from gradveil.metrics.pixel import fft_error, mse, psnr
from gradveil.metrics.structure import ssim
from gradveil.types import Batch


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
