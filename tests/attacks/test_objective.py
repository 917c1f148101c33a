"""The objective's value and gradient against plain autograd, and how many problems fit into memory."""

from typing import Any

import pytest
import torch
from torch import Generator, nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.search.matching import (
    Matching,
    MatchingObjective,
    TotalVariation,
    Unknowns,
    squared_distance,
)
from gradveil.attacks.search.minimise import LBFGS
from gradveil.attacks.search.restarts import MOST_ON_CPU, ON_CPU, problems_at_once
from gradveil.tree import parameters
from gradveil.types import Observation, Update


def observe(model: nn.Module, rng: Generator, **settings: Any) -> Observation:
    gradient = {n: torch.randn(p.shape, generator=rng, dtype=p.dtype) for n, p in parameters(model).items()}
    return Observation(model, Update(gradient, num_examples=2), (1, 8, 8), 5, **settings)


@pytest.mark.parametrize("known", [False, True])
def test_value_and_gradient_are_those_of_the_sum_of_its_terms(model: nn.Module, rng: Generator, known: bool) -> None:
    seen = observe(model.double(), rng, labels=torch.tensor([1, 4]) if known else None)
    unknowns = Unknowns.of(seen)
    assert unknowns.size == 2 * 64 + (0 if known else 10)
    labels = torch.eye(5).double()[[1, 4]][None] if known else None
    terms = (TotalVariation(3.0), TotalVariation(2.0))
    objective = MatchingObjective(Matching.of([seen]), unknowns, labels, squared_distance, terms)
    z = torch.rand(1, unknowns.size, generator=rng, dtype=torch.double)
    value, gradient = objective(z)

    free = z.clone().requires_grad_()
    x = free[0, :128].view(2, 1, 8, 8)
    y = labels[0] if labels is not None else free[0, 128:].view(2, 5).softmax(-1)
    found = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()), create_graph=True)
    distance = sum((g - t).square().sum() for g, t in zip(found, seen.update.gradient.values(), strict=True))
    flat = x.flatten(0, 2)  # rows of both images; no difference is taken across them
    rows = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    columns = (flat[:, 1:] - flat[:, :-1]).abs().mean()
    total = distance + 5 * (rows + columns)
    assert float(value) == pytest.approx(total.item())
    torch.testing.assert_close(gradient, torch.autograd.grad(total, free)[0])
    assert float(objective.residual(z)) == pytest.approx(distance.item())


def test_as_many_problems_run_together_as_fit_into_memory(model: nn.Module) -> None:
    def count(network: nn.Module, shape: tuple[int, ...], history: int) -> int:
        unknowns = Unknowns((1, *shape), 5, (0.0, 1.0), True)
        gradient = {n: torch.ones_like(p) for n, p in parameters(network).items()}
        stack = Matching.of([Observation(network, Update(gradient), shape, 5)])
        return problems_at_once(MatchingObjective(stack, unknowns, None, squared_distance), LBFGS(history))

    assert count(model, (1, 8, 8), 100) == MOST_ON_CPU
    large = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 5))
    pairs = 2 * 4 * 3 * 64 * 64  # bytes of one pair of the history
    assert count(large, (3, 64, 64), 2000) == pytest.approx(ON_CPU / (2000 * pairs), rel=0.1)
    assert count(large, (3, 64, 64), 10**6) == 1
    wide = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 1000), nn.Tanh(), nn.Linear(1000, 5))
    held = ON_CPU / count(wide, (3, 64, 64), 1) / (4 * 1000 * 3 * 64 * 64)  # in gradients of the first layer
    assert 2 < held < 20  # the update, the trial gradient, its slope, and what lives beside them
