"""Batched Adam: torch's own iterates, signs, decay and the box."""

import pytest
import torch
from torch import Tensor

from gradveil.attacks.search.minimise import Adam


def bowl(z: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.arange(1, z.shape[1] + 1, dtype=z.dtype)
    return (scale * (z - 0.3).square()).sum(1), 2 * scale * (z - 0.3)


@pytest.mark.parametrize("signed", [False, True])
def test_it_is_torchs_adam(signed: bool) -> None:
    z = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    optimiser = Adam(1000, lr=0.05, signed=signed)  # no decay yet
    state = optimiser.start(z)
    theirs = z.clone().requires_grad_()
    reference = torch.optim.Adam([theirs], lr=0.05)
    for _ in range(40):
        state = optimiser.step(state, *bowl(state["point"]))
        theirs.grad = bowl(theirs.detach())[1]
        theirs.grad = theirs.grad.sign() if signed else theirs.grad
        reference.step()
    torch.testing.assert_close(state["point"], theirs.detach(), rtol=0, atol=1e-12)


def test_the_step_shrinks_tenfold_at_three_five_and_seven_eighths() -> None:
    optimiser = Adam(80, lr=0.1, signed=True)
    state = optimiser.start(torch.zeros(1, 1, dtype=torch.double))
    lengths = []
    for _ in range(80):
        before = state["point"]
        state = optimiser.step(state, torch.ones(1), torch.ones(1, 1, dtype=torch.double))
        lengths.append(float((state["point"] - before).abs()))
    assert [round(n, 6) for n in (lengths[0], lengths[29], lengths[30], lengths[50], lengths[79])] == [
        0.1, 0.1, 0.01, 0.001, 0.0001,
    ]  # fmt: skip


def test_only_the_boxed_coordinates_are_kept_within_the_bounds() -> None:
    optimiser = Adam(30, lr=0.5, boxed=2, bounds=(-0.1, 0.2))
    state = optimiser.start(torch.zeros(1, 3))
    for _ in range(5):
        state = optimiser.step(state, torch.ones(1), -torch.ones(1, 3))
    assert state["point"][0, :2].tolist() == pytest.approx([0.2, 0.2])
    assert float(state["point"][0, 2]) > 2


def test_the_best_point_is_kept_and_a_dead_problem_is_frozen() -> None:
    optimiser = Adam(30, lr=1.0)
    state, points = optimiser.start(torch.tensor([[0.4], [0.4]])), []
    for k in range(10):
        value, gradient = bowl(state["point"])
        value[1] = torch.nan if k == 3 else value[1]
        points.append(state["point"])
        state = optimiser.step(state, value, gradient)
    assert state["dead"].tolist() == [False, True]
    assert torch.equal(state["point"][1], points[3][1])
    torch.testing.assert_close(bowl(state["best"])[0], state["best_value"])
    assert float(state["best_value"][0]) <= 0.011
