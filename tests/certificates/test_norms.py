"""Operator norms against the dense matrix, and the Fourier bound from above only."""

import math
from math import inf, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.errors import CertificateError
from gradveil.representation import norms
from gradveil.representation.norms import (
    gram,
    lanczos,
    largest_eigenvalue,
    operator_norm,
    spectral,
    torus_bound,
)
from gradveil.representation.problem import step_chain
from gradveil.representation.rules.base import Affine
from gradveil.representation.rules.products import Dense
from gradveil.representation.rules.windows import Convolution, MaxPool


def matrix(step: Affine) -> Tensor:
    """The dense matrix of a linear step, column by column."""
    unit = torch.eye(step.in_size, dtype=torch.float64).reshape(-1, *step.in_shape)
    return step.linear(unit).flatten(1).T


def conv(seed: int, channels: int, out: int, kernel: int, stride: int, pad: int, side: int, **more: int) -> Affine:
    rng = torch.Generator().manual_seed(seed)
    layer = nn.Conv2d(channels, out, kernel, stride, pad, **more)
    layer.weight.data = torch.randn(layer.weight.shape, generator=rng)
    x = torch.rand(1, channels, side, side)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(layer(x).numel(), 2))
    first = step_chain(model, None, x).steps[0]
    assert isinstance(first, Affine)
    assert isinstance(first.operator, Convolution)
    return first


SHAPES = st.tuples(
    st.integers(0, 99), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2),
    st.integers(5, 8),
)  # fmt: skip


@given(SHAPES)
def test_a_convolutions_norms_are_those_of_its_matrix(drawn: tuple[int, ...]) -> None:
    step = conv(*drawn)
    dense = matrix(step)
    for p in (1, 2, inf):
        norm = operator_norm(step, p)
        assert norm.kind == "exact"
        assert norm.value == pytest.approx(float(torch.linalg.matrix_norm(dense, p)), rel=1e-9)


@given(SHAPES, st.integers(1, 2))
def test_the_torus_bound_lies_above_the_norm_and_not_far(drawn: tuple[int, ...], dilation: int) -> None:
    step = conv(*drawn, dilation=dilation)
    true = float(torch.linalg.matrix_norm(matrix(step), 2))
    assert true <= torus_bound(step.operator) * (1 + 1e-9)
    if step.operator.stride == (1, 1):
        assert torus_bound(step.operator) <= sqrt(operator_norm(step, 1).value * operator_norm(step, inf).value) * 3


def test_the_torus_bound_is_exact_for_a_shift_and_for_a_grouped_scaling() -> None:
    shift = conv(0, 1, 1, 3, 1, 1, 6)
    shift.operator.weight.zero_()[0, 0, 0, 2] = -2.5
    assert torus_bound(shift.operator) == pytest.approx(2.5)
    grouped = conv(0, 2, 2, 1, 1, 0, 5, groups=2)
    grouped.operator.weight.copy_(torch.tensor([3.0, -7.0]).reshape(2, 1, 1, 1))
    assert torus_bound(grouped.operator) == pytest.approx(7.0)


def test_the_torus_is_larger_than_the_image_because_padding_is_no_circle() -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 2, padding=1), nn.Flatten(), nn.Linear(4, 2))
    model[0].weight.data = torch.tensor([[[-1.0, 1.0]]])
    step = step_chain(model, None, torch.rand(1, 1, 3)).steps[0]
    assert isinstance(step, Affine)
    assert operator_norm(step, 2).value == pytest.approx(2 * math.cos(math.pi / 8))  # above sqrt(3), the circle's norm
    assert torus_bound(step.operator) == pytest.approx(2.0)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_large_convolution_takes_the_torus_bound_and_says_so(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = conv(3, 2, 3, 3, stride, 1, 8)
    exact = operator_norm(step, 2)
    monkeypatch.setattr(norms, "DENSE", 4)
    bound = operator_norm(step, 2)
    assert bound.kind == "upper bound"
    assert exact.value <= bound.value <= 1.3 * exact.value


def test_average_pooling_and_one_dimensional_convolutions_are_convolutions() -> None:
    pool = step_chain(
        nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 2)), None, torch.rand(1, 1, 4, 4)
    ).steps[0]
    assert operator_norm(pool, 2).value == pytest.approx(0.5)
    assert operator_norm(pool, inf).value == pytest.approx(1.0)
    assert operator_norm(pool, 1).value == pytest.approx(0.25)
    line = step_chain(
        nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)), None, torch.rand(1, 2, 6)
    ).steps[0]
    assert isinstance(line, Affine)
    assert operator_norm(line, 2).value == pytest.approx(float(torch.linalg.matrix_norm(matrix(line), 2)))
    assert torus_bound(line.operator) >= operator_norm(line, 2).value


@given(st.integers(0, 99))
def test_slopes_after_a_map_are_counted_entry_by_entry(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    step = conv(seed, 2, 2, 3, 1, 1, 5)
    after = torch.rand(step.out_shape, generator=rng, dtype=torch.float64)
    joined = after.flatten()[:, None] * matrix(step)
    for p in (1, 2, inf):
        assert operator_norm(step, p, after).value == pytest.approx(float(torch.linalg.matrix_norm(joined, p)))
    weight = torch.randn(3, 4, generator=rng, dtype=torch.float64)
    dense = Affine((4,), (3,), Dense(weight, (1,)), torch.zeros(3))
    slopes = torch.rand(3, generator=rng, dtype=torch.float64)
    assert operator_norm(dense, 2, slopes).value == pytest.approx(
        float(torch.linalg.matrix_norm(slopes[:, None] * weight, 2))
    )


def test_max_pooling_counts_overlapping_windows() -> None:
    apart = MaxPool((1, 6, 6), (1, 3, 3), (2, 2), (2, 2), (0, 0), (1, 1), False)
    over = MaxPool((1, 5, 5), (1, 3, 3), (3, 3), (1, 1), (0, 0), (1, 1), False)
    assert [operator_norm(apart, p).value for p in (1, 2, inf)] == [1.0, 1.0, 1.0]
    assert [operator_norm(over, p).value for p in (1, 2, inf)] == [9.0, 3.0, 1.0]


def test_the_gram_matrix_is_formed_from_the_smaller_side() -> None:
    for step in (conv(1, 1, 3, 3, 1, 1, 5), conv(1, 3, 1, 3, 2, 1, 6)):
        a = matrix(step)
        expected = a.T @ a if step.in_size <= step.out_size else a @ a.T
        torch.testing.assert_close(gram(step, chunk=7), expected)


def test_a_verified_eigenvalue_is_never_below_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(60, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true = float(torch.linalg.eigvalsh(a @ a.T)[-1])
    monkeypatch.setattr(norms, "DIRECT", 10)
    found = largest_eigenvalue(a @ a.T)
    assert true <= found <= true * (1 + 1e-7)
    # Lanczos that stopped too low: the factorisation refuses it until the value is a bound again.
    monkeypatch.setattr(norms, "eigsh", lambda *args, **kwargs: [0.9 * true])
    assert true <= largest_eigenvalue(a @ a.T) <= 2 * true
    monkeypatch.setattr(norms, "eigsh", lambda *args, **kwargs: [0.1 * true])
    assert largest_eigenvalue(a @ a.T) >= true


def test_spectral_takes_stacks_and_wide_and_tall_matrices() -> None:
    a = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert spectral(a) == pytest.approx(float(torch.linalg.matrix_norm(a, 2).max()))
    assert spectral(a[0].T) == pytest.approx(float(torch.linalg.matrix_norm(a[0], 2)))
    assert spectral(a[0, :0]) == 0.0


def test_lanczos_gives_the_largest_singular_values_from_below_with_a_residual() -> None:
    a = torch.randn(4, 12, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    forward, backward = (lambda v: (a @ v[..., None])[..., 0]), (lambda u: (a.mT @ u[..., None])[..., 0])
    true = torch.linalg.matrix_norm(a, 2)
    few, rough = lanczos(forward, backward, start, 2)
    all_, sharp = lanczos(forward, backward, start, 9)
    assert (few <= true * (1 + 1e-12)).all()
    assert (rough > 1e-6).all()
    torch.testing.assert_close(all_, true)
    assert (sharp < 1e-8).all()


def test_other_norms_are_refused() -> None:
    with pytest.raises(CertificateError, match="p is 3"):
        norms.check_p(3)
