import math

import numpy as np
import pytest
import torch
from torch import Generator

from gradveil.modalities.image import ssim, window


def reference(a: np.ndarray, b: np.ndarray, width: int) -> float:
    """SSIM of one channel with reflected borders, window by window (Wang et al. 2004)."""
    sigma, half = 1.5 * width / 11, width // 2
    line = np.exp(-0.5 * (np.arange(-half, half + 1) / sigma) ** 2)
    kernel = np.outer(line, line) / line.sum() ** 2
    pa, pb = (np.pad(x, half, mode="reflect") for x in (a, b))
    values = []
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            wa, wb = pa[i : i + width, j : j + width], pb[i : i + width, j : j + width]
            ma, mb = (kernel * wa).sum(), (kernel * wb).sum()
            va, vb = (kernel * wa**2).sum() - ma**2, (kernel * wb**2).sum() - mb**2
            cov = (kernel * wa * wb).sum() - ma * mb
            c1, c2 = 0.01**2, 0.03**2
            values.append((2 * ma * mb + c1) * (2 * cov + c2) / ((ma**2 + mb**2 + c1) * (va + vb + c2)))
    return float(np.mean(values))


@pytest.mark.parametrize(("side", "width"), [(5, 3), (8, 5), (12, 9), (13, 11), (28, 11)])
def test_the_window_shrinks_with_the_image(side: int, width: int) -> None:
    assert window(side) == width


@pytest.mark.parametrize("side", [8, 13])
def test_ssim_matches_the_formula_done_window_by_window(side: int) -> None:
    rng = Generator().manual_seed(side)
    found, truth = torch.rand(2, 1, side, side, generator=rng), torch.rand(2, 1, side, side, generator=rng)
    expected = [
        reference(f[0].numpy().astype(float), t[0].numpy().astype(float), window(side))
        for f, t in zip(found, truth, strict=True)
    ]
    assert ssim(found, truth).tolist() == pytest.approx(expected, abs=1e-4)


def test_a_copy_scores_one_whoever_is_beside_it() -> None:
    x = torch.rand(3, 3, 8, 8, generator=Generator().manual_seed(0))
    found = torch.stack([x[0], 1 - x[1], x[2]])
    values = ssim(found, x)
    assert values[0] == pytest.approx(1.0)
    assert values[2] == pytest.approx(1.0)
    assert values[1] < 0.5


@pytest.mark.parametrize("shape", [(2, 30), (2, 1, 4, 9)])
def test_what_is_not_an_image_has_no_ssim(shape: tuple[int, ...]) -> None:
    values = ssim(torch.rand(shape), torch.rand(shape))
    assert all(math.isnan(v) for v in values.tolist())
