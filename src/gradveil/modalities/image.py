"""Images: arrays in a data range, measured pixel by pixel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradveil.modalities.base import MODALITIES, Bounds, Metric, Modality, by_name

MAX_PSNR = 120.0  # dB; an exact copy would be infinite, and a mean over images must stay finite


def mse(found: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error of each example: (N, *shape), (N, *shape) -> (N,)."""
    return (found - truth).flatten(1).square().mean(dim=1)


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each example in dB, at most 120: -> (N,).

    10 log10(1 / MSE). Computed by torchmetrics, per example: its default pools the whole batch.
    """
    from torchmetrics.functional.image import peak_signal_noise_ratio

    ratio: Tensor = peak_signal_noise_ratio(found.flatten(1), truth.flatten(1), data_range=1.0, dim=1, reduction="none")
    return ratio.clamp(max=MAX_PSNR).reshape(len(found))


def fft_error(found: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error between the magnitudes of the two spectra: -> (N,).

    mean (|F x'| - |F x|)², F orthonormal over the last two axes (the last one for vectors). It is never more
    than the MSE, and a copy that is only shifted scores 0: texture that is recovered in the wrong place counts.
    """
    axes = tuple(range(max(1, found.ndim - 2), found.ndim))
    spectra = [torch.fft.fftn(x, dim=axes, norm="ortho").abs() for x in (found, truth)]
    return mse(*spectra)


_WINDOW, _SIGMA = 11, 1.5  # Wang et al. 2004
_SMALLEST = 5  # pixels a side: below, no window of 3 leaves anything to compare


def ssim(found: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity of each image, 1 for a copy: (N, C, H, W) -> (N,).

    The Gaussian window has the usual 11 pixels (sigma 1.5) where the shorter side has at least 13; smaller
    images get the largest odd window that is 2 pixels shorter than that side, with sigma scaled in
    proportion (8×8: 5 pixels, sigma 0.68). Values at different image sizes are therefore not comparable.
    NaN where the examples are not images of at least 5×5 pixels: vectors have no structure to compare.
    """
    if found.ndim != 4 or min(found.shape[-2:]) < _SMALLEST:
        return torch.full((len(found),), torch.nan)
    from torchmetrics.functional.image import structural_similarity_index_measure

    sigma = _SIGMA * window(min(found.shape[-2:])) / _WINDOW
    value: Tensor = structural_similarity_index_measure(
        found.float(), truth.float(), sigma=sigma, data_range=1.0, reduction="none"
    )
    return value.reshape(len(found))


def window(side: int) -> int:
    """Return the width of the Gaussian window for images whose shorter side has ``side`` pixels."""
    widest = min(_WINDOW, side - 2)
    return widest if widest % 2 else widest - 1


@MODALITIES.register("image")
@dataclass(frozen=True)
class Image(Modality):
    """Pixels in the data range, scaled to [0, 1] and clamped before they are measured."""

    one, many, part = "image", "images", "pixel"
    guesses = ("grey", "mean image", "class mean")
    # LPIPS is left out: its weights are a download of a network trained on other data, and none come with the package.
    metrics: ClassVar[Mapping[str, Metric]] = by_name(
        Metric("mse", mse, "lower", "Mean squared error per pixel, pixels in [0, 1]."),
        Metric("psnr", psnr, "higher", "Peak signal-to-noise ratio in dB, at most 120.", False, "PSNR dB", ".1f"),
        Metric("ssim", ssim, "higher", "Structural similarity; a smaller window on images under 13 pixels.", False,
               "SSIM", ".2f"),
        Metric("fft", fft_error, "lower", "Squared error between magnitude spectra: texture, wherever it lies.", False,
               "FFT"),
    )  # fmt: skip
    error, error_name, error_axis = "mse", "MSE", "mean squared error"
    error_text = "Mean squared error per pixel, pixels in [0, 1], after clamping to the data range"
    guess_text = "plain grey, the mean of public images, or that of the right class"
    default_model = "lenet:strides=2/1"  # sigmoid, as published, but two convolutions deep: it learns digits quickly

    def unit(self, x: Tensor, bounds: Bounds) -> Tensor:
        low, high = bounds
        scaled = (x.detach().cpu().float() - low) / (high - low)
        return scaled.nan_to_num(nan=0.5, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)

    def ignorant(self, like: Tensor, bounds: Bounds) -> Tensor:
        return torch.full_like(like, sum(bounds) / 2)

    def typical(self, public: Tensor) -> Tensor:
        return public.mean(dim=0)


IMAGE = Image()
