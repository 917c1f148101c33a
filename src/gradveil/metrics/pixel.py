"""Distances between a reconstruction and its original, one value per example, both in [0, 1]."""

import torch
from torch import Tensor

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
