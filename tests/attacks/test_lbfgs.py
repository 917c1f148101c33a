"""Batched L-BFGS: torch's own iterates, a line search that never rises, and problems that do not touch."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil.attacks.search.minimise import LBFGS, State

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]


def evaluator(function: Callable[[Tensor], Tensor]) -> Evaluate:
    def evaluate(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().requires_grad_()
        value = function(z)
        return value.detach(), torch.autograd.grad(value.sum(), z)[0]

    return evaluate


def residuals(seed: int, problems: int = 4) -> Callable[[Tensor], Tensor]:
    """Least squares with a mild bend, so that curvature changes on the way."""
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(problems, 70, 60, generator=rng, dtype=torch.double)
    b = torch.randn(problems, 70, generator=rng, dtype=torch.double)

    def function(z: Tensor) -> Tensor:
        linear = torch.einsum("pij,pj->pi", a, z) - b
        return (linear + 0.1 * torch.sin(linear)).square().sum(1)

    return function


def rosenbrock(z: Tensor) -> Tensor:
    return ((1 - z[:, :-1]) ** 2 + 100 * (z[:, 1:] - z[:, :-1] ** 2) ** 2).sum(1)


def run(optimiser: LBFGS, evaluate: Evaluate, z: Tensor, steps: int) -> list[State]:
    states = [optimiser.start(z)]
    for k in range(steps):
        states.append(optimiser.step(states[-1], *evaluate(states[-1]["point"]), done=k))
    return states


@pytest.mark.parametrize("history", [5, 100])
def test_without_a_line_search_it_is_torchs_lbfgs_after_40_iterations(history: int) -> None:
    function = residuals(0)
    z = torch.randn(4, 60, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    ours = run(LBFGS(history, search=False), evaluator(function), z, 41)[-1]

    for i in range(4):
        alone = z[i].clone().requires_grad_()
        theirs = torch.optim.LBFGS(
            [alone], max_iter=40, max_eval=100, history_size=history, tolerance_grad=0, tolerance_change=0
        )

        def closure(theirs: torch.optim.LBFGS = theirs, alone: Tensor = alone, i: int = i) -> Tensor:
            theirs.zero_grad()
            value = function(alone.expand(4, -1))[i]
            value.backward()
            return value

        theirs.step(closure)
        torch.testing.assert_close(ours["z"][i], alone.detach(), rtol=0, atol=1e-10)
        assert int(ours["iterations"][i]) == 40


def two_loops(pairs: list[Tensor], g: Tensor, gamma: Tensor) -> Tensor:
    """The textbook recursion (Nocedal and Wright, algorithm 7.4), oldest pair first."""
    q, alphas = g.clone(), []
    for s, y in reversed(pairs):
        alphas.append(s @ q / (y @ s))
        q = q - alphas[-1] * y
    r = gamma * q
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        r = r + s * (alpha - y @ r / (y @ s))
    return -r


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.double, 1e-12), (torch.float, 1e-4)])
def test_the_compact_direction_is_that_of_the_two_loop_recursion(dtype: torch.dtype, tolerance: float) -> None:
    function, history = residuals(5), 7
    rng = torch.Generator().manual_seed(1)
    evaluate = evaluator(lambda z: function(z.double()).to(dtype))
    states = run(LBFGS(history), evaluate, torch.randn(4, 60, generator=rng).to(dtype), 25)
    last = states[-1]
    for i in range(4):
        filled = [int(a["slot"][i]) for a, b in pairwise(states) if a["slot"][i] != b["slot"][i]]
        assert len(filled) > history  # the ring has gone round
        pairs = [last["pairs"][i, slot].double() for slot in filled[-history:]]
        expected = two_loops(pairs, last["gradient"][i].double(), last["gamma"][i].double())
        assert float((last["direction"][i] - expected).norm() / expected.norm()) < tolerance


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), history=st.sampled_from([1, 3, 20]))
def test_with_a_line_search_the_value_never_rises_beyond_rounding(seed: int, history: int) -> None:
    z = 3 * torch.randn(3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    values = torch.stack([s["value"] for s in run(LBFGS(history), evaluator(rosenbrock), z, 60)[1:]])
    assert bool((values[1:] <= values[:-1] * (1 + 2e-8)).all())
    assert bool((values[-1] < values[0]).all())


def test_the_line_search_holds_where_plain_steps_run_away() -> None:
    rng = torch.Generator().manual_seed(0)
    a = 0.5 * torch.randn(8, 30, 20, generator=rng, dtype=torch.double)

    def saturating(z: Tensor) -> Tensor:
        return (torch.tanh(torch.einsum("pij,pj->pi", a, z)) - 0.3).square().sum(1)

    z = torch.randn(8, 20, generator=rng, dtype=torch.double)
    searched = run(LBFGS(), evaluator(saturating), z, 200)[-1]
    plain = run(LBFGS(search=False), evaluator(saturating), z, 200)[-1]
    assert float(searched["value"].median()) < 1
    assert float(plain["value"].median()) > 10 * float(searched["value"].median())


@pytest.mark.parametrize("search", [True, False])
def test_a_problem_goes_the_same_way_alone_and_in_company(search: bool) -> None:
    function, z = residuals(3), torch.randn(4, 60, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    together = run(LBFGS(7, search=search), evaluator(function), z, 50)[-1]
    for i in range(4):

        def one(point: Tensor, i: int = i) -> Tensor:
            return function(point.expand(4, -1))[i : i + 1]

        alone = run(LBFGS(7, search=search), evaluator(one), z[i : i + 1], 50)[-1]
        torch.testing.assert_close(together["z"][i], alone["z"][0], rtol=0, atol=1e-10)


def test_a_cliff_of_nan_is_backed_away_from() -> None:
    def cliff(z: Tensor) -> Tensor:
        return -torch.log(1 - z.square().sum(1)) + (z - 0.9).square().sum(1)  # NaN outside the unit ball

    state = run(LBFGS(), evaluator(cliff), torch.full((2, 3), 0.1, dtype=torch.double), 60)[-1]
    assert not bool(state["dead"].any())
    assert bool(state["value"].isfinite().all())
    assert float(state["gradient"].abs().max()) < 1e-6


def test_a_start_without_a_value_is_dead_and_stays_where_it_is() -> None:
    def function(z: Tensor) -> Tensor:
        return (z.sqrt() - 1).square().sum(1)  # NaN for negative z

    start = torch.tensor([[4.0, 9.0], [-1.0, 4.0]])
    state = run(LBFGS(), evaluator(function), start, 40)[-1]
    assert state["dead"].tolist() == [False, True]
    assert float(state["value"][0]) < 1e-10
    assert torch.equal(state["point"][1], start[1])
    assert float(state["best_value"][1]) == torch.inf


def test_without_a_search_a_problem_that_blows_up_dies_and_keeps_its_best_point() -> None:
    def function(z: Tensor) -> Tensor:
        return torch.where(z[:, 0] > 2.5, torch.nan, z[:, 0] ** 4 - 8 * z[:, 0] ** 2)

    state = run(LBFGS(search=False), evaluator(function), torch.tensor([[0.3]]), 30)[-1]
    assert bool(state["dead"].all())
    assert bool(state["best_value"].isfinite().all())
    assert bool(function(state["best"]).isfinite().all())


def test_the_best_point_is_the_lowest_seen_even_where_plain_steps_rise() -> None:
    z = 3 * torch.randn(6, 6, generator=torch.Generator().manual_seed(4), dtype=torch.double)
    states = run(LBFGS(search=False), evaluator(rosenbrock), z, 40)[1:]
    values = torch.stack([s["value"] for s in states])
    assert bool((values[1:] > values[:-1]).any())
    torch.testing.assert_close(states[-1]["best_value"], values.min(0).values)
    torch.testing.assert_close(rosenbrock(states[-1]["best"]), states[-1]["best_value"])


def test_a_minimum_is_a_place_to_be_stuck() -> None:
    state = run(LBFGS(), evaluator(lambda z: z.square().sum(1)), torch.zeros(1, 3), 3)[-1]
    assert bool(state["stuck"].all())
    assert bool(state["value"].eq(0).all())
