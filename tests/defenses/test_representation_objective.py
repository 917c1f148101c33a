from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from gradveil.modules import representation
from gradveil.representation.scores import leak_scores
from gradveil.representation.selection import (
    PseudoInverse,
    best_direction,
    jacobian,
)

norms = st.sampled_from([1.0, 2.0, inf])


def problem(seed: int, length: int = 7, size: int = 5) -> tuple[PseudoInverse, Tensor]:
    rng = Generator().manual_seed(seed)
    j = torch.randn(length, size, generator=rng, dtype=torch.float64)
    r = torch.randn(length, generator=rng, dtype=torch.float64)
    r[seed % length] = 0.0
    return PseudoInverse.of(j, 1e-6), r


def displacement(inverse: PseudoInverse, u: Tensor, p: float) -> float:
    return float(torch.linalg.vector_norm(inverse.dense() @ u, p))


def test_the_pseudo_inverse_is_the_one_of_linear_algebra() -> None:
    j = torch.randn(4, 6, generator=Generator().manual_seed(0), dtype=torch.float64)
    assert_close(PseudoInverse.of(j, 1e-9).dense(), torch.linalg.pinv(j))


def test_small_singular_values_are_left_out() -> None:
    inverse = PseudoInverse.of(torch.diag(torch.tensor([1.0, 0.5, 1e-4])), 0.01)
    assert_close(inverse.values, torch.tensor([1.0, 0.5]))
    assert_close(inverse.dense(), torch.diag(torch.tensor([1.0, 2.0, 0.0])))


def test_for_one_pixel_the_row_is_chosen_in_the_norm_that_is_dual_to_q() -> None:
    a = torch.tensor([[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    inverse = PseudoInverse.of(torch.linalg.pinv(a), 1e-9)
    assert_close(inverse.dense(), a)
    assert displacement(inverse, best_direction(inverse, inf, inf), inf) == pytest.approx(4)
    assert displacement(inverse, best_direction(inverse, inf, 2), inf) == pytest.approx(3)


@given(st.integers(0, 30), norms)
def test_for_q_1_no_single_entry_does_better(seed: int, p: float) -> None:
    inverse, _ = problem(seed)
    u = best_direction(inverse, p, 1)
    assert float(u.abs().sum()) == pytest.approx(1)
    assert displacement(inverse, u, p) == pytest.approx(max(displacement(inverse, e, p) for e in torch.eye(7).double()))


@given(st.integers(0, 30), norms)
def test_for_q_inf_no_corner_does_much_better_and_none_for_p_inf(seed: int, p: float) -> None:
    inverse, _ = problem(seed)
    u = best_direction(inverse, p, inf)
    assert bool((u.abs() == 1).all())
    best = max(displacement(inverse, torch.tensor(c, dtype=torch.float64), p) for c in product([-1.0, 1.0], repeat=7))
    assert displacement(inverse, u, p) >= (1 - 1e-9 if p == inf else 0.7) * best


@given(st.integers(0, 30), norms)
def test_for_q_2_no_direction_tried_does_better(seed: int, p: float) -> None:
    inverse, _ = problem(seed)
    u = best_direction(inverse, p, 2)
    assert float(u.norm()) == pytest.approx(1)
    trials = torch.randn(2000, 7, generator=Generator().manual_seed(seed), dtype=torch.float64)
    best = max(displacement(inverse, t / t.norm(), p) for t in trials)
    assert displacement(inverse, u, p) >= (1.0 if p != 1 else 0.9) * best


def test_for_q_2_p_2_the_displacement_is_one_over_the_smallest_singular_value() -> None:
    inverse, _ = problem(2)
    assert displacement(inverse, best_direction(inverse, 2, 2), 2) == pytest.approx(1 / float(inverse.values[-1]))


def test_the_jacobian_has_the_rows_whose_norms_the_scores_use(model: nn.Module) -> None:
    x = torch.rand(2, 1, 8, 8, generator=Generator().manual_seed(0))
    r = representation(model, "5", x)
    j = jacobian(model, "5", x, r)
    assert j.shape == (2, 64, 64)
    assert_close(r.abs() / j.norm(dim=2), leak_scores(model, "5", x, method="loop"))
