"""The objective's value and gradient against plain autograd, and what GradInversion puts into it."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.gradinversion import GradInversion, relative_distance
from gradveil.attacks.search.matching import (
    Energy,
    GroupConsistency,
    Matching,
    MatchingObjective,
    SentStatistics,
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
    terms = (TotalVariation(3.0), Energy(2.0))
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
    total = distance + 3 * (rows + columns) + 2 * x.square().mean()
    assert float(value) == pytest.approx(total.item())
    torch.testing.assert_close(gradient, torch.autograd.grad(total, free)[0])
    assert float(objective.residual(z)) == pytest.approx(distance.item())


def test_the_relative_distance_is_one_for_a_gradient_of_zero_and_has_its_own_derivative(
    model: nn.Module, rng: Generator
) -> None:
    stack = Matching.of([observe(model.double(), rng), observe(model, rng).masked("0.*")])
    nothing = {n: torch.zeros_like(g) for n, g in stack.target.items()}
    assert relative_distance(stack, nothing)[0].tolist() == pytest.approx([1, 1])
    found = {n: torch.randn_like(g) for n, g in stack.target.items()}
    free = {n: g.detach().requires_grad_() for n, g in found.items()}
    expected = torch.autograd.grad(relative_distance(stack, free)[0].sum(), list(free.values()))
    for (n, slope), by_torch in zip(relative_distance(stack, found)[1].items(), expected, strict=True):
        torch.testing.assert_close(slope, by_torch, msg=n)


def test_gradinversion_adds_the_terms_that_a_model_allows(model: nn.Module, rng: Generator) -> None:
    attack = GradInversion(tv=1.0, l2=2.0, bn=3.0, group=4.0, restarts=2)
    owner: Tensor = torch.tensor([0, 0])
    seen = observe(model, rng)
    tv = torch.tensor([1.0, 0.5])
    plain = attack._terms([seen], Unknowns.of(seen), owner, tv)
    assert [type(t) for t in plain] == [Energy, TotalVariation, GroupConsistency]
    assert (plain[0].weight, plain[2].weight) == (2.0, 4.0)  # type: ignore[attr-defined]
    assert torch.equal(plain[1].weight, tv)  # type: ignore[attr-defined]
    normed = observe(nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 5)), rng)
    vector = Unknowns((2, 64), 5, (0.0, 1.0), True)
    terms = GradInversion(bn=3.0, restarts=1)._terms([normed], vector, owner, tv)
    assert [type(t) for t in terms] == [Energy, SentStatistics]
    assert terms[1].weight == 3.0  # type: ignore[attr-defined]


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
