import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from gradveil.modalities.image import MAX_PSNR, fft_error, mse, psnr


def images(seed: int, n: int = 3, side: int = 6) -> torch.Tensor:
    return torch.rand(n, 2, side, side, generator=Generator().manual_seed(seed))


def test_mse_is_one_value_per_example_done_by_hand() -> None:
    found = torch.zeros(2, 1, 2, 2)
    truth = torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]], [[[0.5, 0.5], [0.5, 0.5]]]])
    assert mse(found, truth).tolist() == [0.25, 0.25]


def test_psnr_is_minus_ten_log_mse_of_each_example_and_not_of_the_batch() -> None:
    truth = torch.zeros(2, 1, 4, 4)
    found = torch.stack([torch.full((1, 4, 4), 0.1), torch.full((1, 4, 4), 0.5)])
    expected = [20.0, 10 * math.log10(4)]
    assert psnr(found, truth).tolist() == pytest.approx(expected, abs=1e-4)


def test_psnr_of_an_exact_copy_is_finite() -> None:
    assert psnr(images(0), images(0)).tolist() == [MAX_PSNR] * 3


@given(st.integers(0, 1000))
def test_fft_error_is_never_more_than_mse(seed: int) -> None:
    found, truth = images(seed), images(seed + 1)
    assert bool((fft_error(found, truth) <= mse(found, truth) + 1e-7).all())


@given(st.integers(0, 5), st.integers(0, 5))
def test_fft_error_forgives_a_shift_and_mse_does_not(down: int, right: int) -> None:
    truth = images(7)
    found = truth.roll((down, right), dims=(2, 3))
    assert fft_error(found, truth).max() < 1e-10
    if (down, right) != (0, 0):
        assert mse(found, truth).min() > 1e-2


def test_fft_error_sees_a_change_of_contrast() -> None:
    truth = images(3)
    assert fft_error(0.5 * truth, truth).min() > 1e-3


def test_vectors_are_measured_too() -> None:
    found, truth = torch.rand(4, 9), torch.rand(4, 9)
    for metric in (mse, psnr, fft_error):
        assert metric(found, truth).shape == (4,)
