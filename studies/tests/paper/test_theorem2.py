"""Theorem 2 as printed is false; theorems A and B hold on runs that meet their assumptions."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Generator, Tensor

from gradveil.errors import CertificateError
from gradveil_studies.paper.theorem2 import (
    Constants,
    LogisticProblem,
    a_posteriori,
    brightest_removed,
    extend,
    printed_bound,
    theorem_a,
    theorem_b,
)

ONE = Constants(
    smoothness=0.35, convexity=0.1, parts=torch.ones(1), sigmas=torch.zeros(1), gradient=0.5, output=0.5, spread=0.0,
    distance=0.0, displacement=1.0,
)  # fmt: skip


def test_the_counterexample_meets_every_assumption_and_breaks_the_printed_bound() -> None:
    # One device, one sample x = 1, y = 1: F(w) = log(1 + e^-w) + 0.05 w². The defence zeroes the only entry.
    def f(w: float) -> float:
        return math.log1p(math.exp(-w)) + 0.05 * w * w

    best = minimize_scalar(f)
    constants = replace(ONE, distance=float(best.x))
    w = 0.0
    for t in range(2000):  # the defended step: data gradient -(1 - sigmoid(w)) x′ with x′ = 0, and the decay
        w -= 2 / (0.1 * (constants.gamma(1) + t)) * (0.0 + 0.1 * w)
    assert w == 0.0
    gap = f(w) - float(best.fun)
    assert gap == pytest.approx(0.381, abs=5e-4)
    assert constants.gamma(1) == pytest.approx(28)
    # The assumptions, on the whole segment from 0 to W* where nothing ever leaves:
    slope = [abs(-1 / (1 + math.exp(v))) for v in torch.linspace(0, float(best.x), 50).tolist()]
    assert max(slope) <= constants.output
    assert max(s - 0.1 * v for s, v in zip(slope, torch.linspace(0, float(best.x), 50).tolist(), strict=True)) <= 0.5
    assert printed_bound(constants, 1.0, 1, 1, 682) > gap
    assert printed_bound(constants, 1.0, 1, 1, 683) < gap  # false from here on
    assert printed_bound(constants, 1.0, 1, 1, 683) == pytest.approx(271.1 / (28 + 683), rel=1e-3)
    # The corrected ones hold for ever: the bias at w = 0 is 1/2.
    for steps in (1, 683, 10**6, 10**12):
        assert theorem_a(constants, 1, 1, steps).value >= gap
        assert theorem_b(constants, steps, gap, 0.0).value >= gap
    assert a_posteriori(0.5, 0.1) >= gap


def test_the_printed_bound_vanishes_and_the_corrected_ones_keep_a_floor() -> None:
    far = 10**15
    assert printed_bound(ONE, 1.0, 5, 2, far) < 1e-9
    a, b = theorem_a(ONE, 5, 2, far), theorem_b(ONE, far, 1.0, 1.0)
    assert a.vanishing < 1e-9
    assert a.floor == pytest.approx(8 / 3 * 3.5 * 0.25 / 0.1)
    assert b.floor == pytest.approx(0.25 / 0.2)
    assert theorem_a(ONE, 5, 2, far, bias=0.0).floor == 0
    assert b.value == b.vanishing + b.floor


@given(st.integers(0, 10_000))
def test_the_recursions_stay_under_the_closed_forms(seed: int) -> None:
    """Iterate the worst case that the proofs allow, step by step, and compare with what they conclude."""
    rng = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> float:
        return float(low * (high / low) ** torch.rand(1, generator=rng))

    mu, kappa = draw(0.01, 1), draw(1, 50)
    c = Constants(
        mu * kappa, mu, torch.ones(3) / 3, torch.full((3,), draw(0.01, 3)), draw(0.1, 5), 1.0, draw(0.001, 1),
        draw(0.1, 5), draw(0.01, 1),
    )  # fmt: skip
    devices, local = 2, int(torch.randint(1, 6, (1,), generator=rng))
    bias = c.error * draw(0.1, 1)
    q = float((c.parts**2 * (c.sigmas + c.error) ** 2).sum()) + bias**2
    q += 17 / 16 * (6 * c.smoothness * c.spread + 8 * (local - 1) ** 2 * c.gradient**2)
    noise = q + 4 / devices * local**2 * c.gradient**2
    distance, gap, variance = c.distance**2, c.smoothness / 2 * c.distance**2, draw(0.01, 4)
    first = gap
    for t in range(300):
        eta = 2 / (mu * (c.gamma(local) + t))
        assert c.smoothness / 2 * distance <= theorem_a(c, local, devices, t, bias).value * (1 + 1e-9)
        distance = (1 - 0.75 * eta * mu) * distance + eta**2 * noise + 4 * eta * bias**2 / mu
        eta = 2 / (mu * (c.gamma(1) + t))
        assert gap <= theorem_b(c, t, first, variance, bias).value * (1 + 1e-9)
        gap = (1 - eta * mu) * gap + eta * bias**2 / 2 + c.smoothness * eta**2 * variance / 2


def toy(rng: Generator, decay: float = 0.1) -> tuple[LogisticProblem, Tensor]:
    inputs = torch.rand(60, 6, generator=rng)
    labels = (inputs[:, :3].argmax(1) + (torch.rand(60, generator=rng) < 0.2).long()) % 3
    problem = LogisticProblem(inputs, labels, torch.arange(60) // 15, decay, num_classes=3)
    return problem, extend(brightest_removed(inputs, 2))


def test_gradient_and_value_are_those_of_autograd(rng: Generator) -> None:
    problem, seen = toy(rng)
    w = torch.randn(3, 7, generator=rng, dtype=torch.float64).requires_grad_()
    loss = torch.nn.functional.cross_entropy(extend(problem.inputs) @ w.T, problem.labels)
    loss = loss + 0.05 * w.square().sum()
    assert problem.value(w.detach()) == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(problem.gradient(w.detach()), torch.autograd.grad(loss, w)[0])
    defended = sum(
        torch.outer((w[:, :] @ extend(problem.inputs)[i]).softmax(0) - problem.onehot[i], seen[i]) for i in range(60)
    )
    torch.testing.assert_close(problem.gradient(w.detach(), seen), (defended / 60 + 0.1 * w).detach())


def test_the_constants_bound_what_they_claim_to_bound(rng: Generator) -> None:
    problem, seen = toy(rng)
    near = problem.minimum(1e-9)
    c = problem.constants(near, seen, batch_size=4)
    assert c.known is not None
    assert {k.how for k in c.known.values()} == {"exact", "bounded"}
    worst_spread = 0.0
    for trial in range(30):
        w = torch.randn(3, 7, generator=rng, dtype=torch.float64) * (0.2 + trial / 10)
        other = torch.randn(3, 7, generator=rng, dtype=torch.float64)
        for k in range(4):
            f = problem.device(k)
            gap = f.value(other) - f.value(w) - float((f.gradient(w) * (other - w)).sum())
            apart = float((other - w).square().sum()) / 2
            assert c.convexity * apart * (1 - 1e-9) <= gap <= c.smoothness * apart * (1 + 1e-9)
            worst_spread = max(worst_spread, problem.value(near) - f.value(f.minimum(1e-9)))
            draws = [torch.randperm(15, generator=rng)[:4] for _ in range(40)]
            stochastic = torch.stack(
                [LogisticProblem(f.inputs[i], f.labels[i], f.owner[i], 0.1, 3).gradient(w) for i in draws]
            )
            assert float((stochastic - f.gradient(w)).square().sum((1, 2)).mean().sqrt()) <= float(c.sigmas[k])
        assert problem.bias(w, seen) <= c.error
    assert 0 < c.spread <= worst_spread + 1e-6
    assert c.distance >= float(near.norm())
    assert a_posteriori(float(problem.gradient(near).norm()), 0.1) < 1e-9
    assert torch.equal(c.parts, torch.full((4,), 0.25, dtype=torch.float64))


def test_the_smoothness_is_attained_where_two_classes_are_even(rng: Generator) -> None:
    inputs = torch.rand(30, 6, generator=rng)
    problem = LogisticProblem(inputs, torch.arange(30) % 2, torch.zeros(30, dtype=torch.int64), 0.1, num_classes=2)
    values, vectors = torch.linalg.eigh(extend(inputs).T @ extend(inputs) / 30)
    assert problem.smoothness() == pytest.approx(0.1 + float(values[-1]) / 2)
    step = 1e-4 * torch.outer(torch.tensor([1.0, -1.0], dtype=torch.float64) / math.sqrt(2), vectors[:, -1])
    bend = ((problem.gradient(step) - problem.gradient(-step)) * step).sum() / (2 * step.square().sum())
    assert float(bend) == pytest.approx(
        problem.smoothness(), rel=1e-5
    )  # softmax = (1/2, 1/2): its Hessian's norm is 1/2
    two = LogisticProblem(inputs, torch.arange(30) % 2, torch.arange(30) // 15, 0.1, num_classes=2)
    assert two.smoothness() == pytest.approx(max(two.device(k).smoothness() for k in (0, 1)))


def test_theorem_b_and_the_a_posteriori_gap_hold_on_a_defended_run(rng: Generator) -> None:
    problem, seen = toy(rng)
    near = problem.minimum(1e-10)
    c, lowest = problem.constants(near, seen, 15), problem.value(near)
    w, gap, bias = problem.start(), problem.value(problem.start()) - lowest, 0.0
    path = []
    for t in range(3000):
        bias = max(bias, problem.bias(w, seen))
        path.append((t, problem.value(w) - lowest, float(problem.gradient(w).norm())))
        w = w - 2 / (c.convexity * (c.gamma(1) + t)) * problem.gradient(w, seen)
    for t, found, size in path[::100]:
        assert found <= theorem_b(c, t, gap, 0.0, bias).value
        assert found <= a_posteriori(size, c.convexity) + 1e-9
    # At the end the defended field is nearly zero, so the true gradient is the bias, and the gap stays.
    end = path[-1]
    assert end[2] == pytest.approx(problem.bias(w, seen), rel=0.2)
    assert end[1] > 1e-3
    assert end[1] <= bias**2 / (2 * c.convexity)


def test_theorem_a_holds_on_federated_runs_with_local_steps(rng: Generator) -> None:
    problem, seen = toy(rng)
    near = problem.minimum(1e-9)
    c, lowest = problem.constants(near, seen, 5), problem.value(near)
    local, devices, rounds = 4, 2, 60
    gaps = []
    for _ in range(5):
        w = problem.start()
        for t in range(rounds):
            ends = []
            for k in torch.randint(0, 4, (devices,), generator=rng).tolist():
                mine = torch.nonzero(problem.owner == k)[:, 0]
                v = w
                for i in range(local):
                    chosen = mine[torch.randperm(15, generator=rng)[:5]]
                    part = LogisticProblem(problem.inputs[chosen], problem.labels[chosen], chosen * 0, 0.1, 3)
                    eta = 2 / (c.convexity * (c.gamma(local) + t * local + i))
                    v = v - eta * part.gradient(v, seen[chosen])
                ends.append(v)
            w = torch.stack(ends).mean(0)
        gaps.append(problem.value(w) - lowest)
    assert sum(gaps) / 5 <= theorem_a(c, local, devices, rounds * local).value


def test_the_brightest_pixels_go_first_and_ties_by_index() -> None:
    x = torch.tensor([[0.2, 0.9, 0.9, 0.0], [0.0, 0.0, 0.0, 0.5]])
    expected = torch.tensor([[0.2, 0.0, 0.9, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert torch.equal(brightest_removed(x, 1), expected)


def test_without_strong_convexity_there_is_no_bound() -> None:
    with pytest.raises(CertificateError, match="add weight decay"):
        replace(ONE, convexity=0.0)


def test_more_devices_lower_the_variance() -> None:
    assert theorem_a(ONE, 3, 10, 100).value < theorem_a(ONE, 3, 1, 100).value
