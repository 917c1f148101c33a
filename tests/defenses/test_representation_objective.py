import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from gradveil.modules import representation
from gradveil.representation.scores import leak_scores
from gradveil.representation.selection import best_direction, jacobian


def displacement(j: Tensor, u: Tensor) -> float:
    return float((torch.linalg.pinv(j, rtol=0.01) @ u).norm())


@given(st.integers(0, 30))
def test_no_direction_tried_does_better(seed: int) -> None:
    j = torch.randn(7, 5, generator=Generator().manual_seed(seed), dtype=torch.float64)
    u = best_direction(j)
    assert u is not None
    assert float(u.norm()) == pytest.approx(1)
    assert displacement(j, u) == pytest.approx(1 / float(torch.linalg.svdvals(j)[-1]))
    trials = torch.randn(2000, 7, generator=Generator().manual_seed(seed), dtype=torch.float64)
    assert displacement(j, u) >= max(displacement(j, t / t.norm()) for t in trials[:200])


def test_small_singular_values_are_left_out() -> None:
    u = best_direction(torch.diag(torch.tensor([1.0, 0.5, 1e-4])))
    assert u is not None
    assert_close(u.abs(), torch.tensor([0.0, 1.0, 0.0]))
    assert best_direction(torch.zeros(3, 2)) is None


def test_the_jacobian_has_the_rows_whose_norms_the_scores_use(model: nn.Module) -> None:
    x = torch.rand(2, 1, 8, 8, generator=Generator().manual_seed(0))
    r = representation(model, "5", x)
    j = jacobian(model, "5", x, r)
    assert j.shape == (2, 64, 64)
    assert_close(r.abs() / j.norm(dim=2), leak_scores(model, "5", x, method="loop"))
