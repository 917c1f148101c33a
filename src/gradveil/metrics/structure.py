"""Structural similarity, from torchmetrics, also for images smaller than its usual window."""

import torch
from torch import Tensor

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
