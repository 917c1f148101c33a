"""Stacked problems: distances and their derivatives, weights, noise, dropped tensors, simulation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.search.matching import Matching, cosine_distance, squared_distance, stack_key
from gradveil.errors import AttackError, UpdateError
from gradveil.gradients.functional import trial_gradients
from gradveil.tree import Params, parameters
from gradveil.types import Observation, Update


def observe(model: nn.Module, rng: Generator, **settings: object) -> Observation:
    gradient = {n: torch.randn(p.shape, generator=rng, dtype=p.dtype) for n, p in parameters(model).items()}
    return Observation(model, Update(gradient), (1, 8, 8), 5, **settings)  # type: ignore[arg-type]


@pytest.fixture
def double(model: nn.Module) -> nn.Module:
    return model.double()


def test_a_dropped_tensor_a_masked_one_and_noise_become_weights(double: nn.Module, rng: Generator) -> None:
    whole = observe(double, rng)
    gradient = whole.update.gradient
    gradient["5.weight"][:, :10] = 0
    noisy = replace(whole, noise=dict.fromkeys(gradient, 2.0) | {"0.bias": 4.0})
    stack = Matching.of([whole, whole.without("5.weight"), whole.masked("5.weight"), noisy])
    assert torch.equal(stack.weights["5.weight"][0], torch.ones(5, 64).double())
    assert not stack.weights["5.weight"][1].any()
    assert torch.equal(stack.weights["5.weight"][2], (gradient["5.weight"] != 0).double())
    assert stack.weights["0.bias"].flatten().tolist() == [1, 1, 1, 0.25]
    assert "0.weight" not in stack.weights
    entries = sum(g.numel() for g in gradient.values())
    assert stack.floor.tolist() == pytest.approx([0, 0, 0, 4.0 * entries])


def test_a_tensor_that_no_problem_matches_is_left_out(double: nn.Module, rng: Generator) -> None:
    stack = Matching.of([observe(double, rng).only("5.*")])
    assert stack.names == ("5.weight", "5.bias")


@pytest.mark.parametrize("distance", [squared_distance, cosine_distance])
def test_a_distance_comes_with_its_own_derivative(
    double: nn.Module, rng: Generator, distance: Callable[[Matching, Params], tuple[Tensor, Params]]
) -> None:
    seen = [observe(double, rng).masked("0.*"), observe(double, rng).without("2.*")]
    stack = Matching.of(seen)
    found = {n: torch.randn_like(g).requires_grad_() for n, g in stack.target.items()}
    values, slopes = distance(stack, found)
    by_autograd = torch.autograd.grad(values.sum(), list(found.values()), allow_unused=True)
    for (n, slope), expected in zip(slopes.items(), by_autograd, strict=True):
        torch.testing.assert_close(slope.detach(), expected, msg=n)


def test_distances_are_those_of_the_definition(double: nn.Module, rng: Generator) -> None:
    seen = observe(double, rng)
    stack = Matching.of([seen])
    found = {n: torch.randn_like(g) for n, g in stack.target.items()}
    a = torch.cat([found[n][0].flatten() for n in stack.names])
    b = torch.cat([seen.update.gradient[n].flatten() for n in stack.names])
    assert float(squared_distance(stack, found)[0]) == pytest.approx(float((a - b).square().sum()))
    assert float(cosine_distance(stack, found)[0]) == pytest.approx(1 - float(torch.cosine_similarity(a, b, 0)))
    assert float(stack.energy) == pytest.approx(float(b.square().sum()))


def test_the_cosine_of_a_vanished_gradient_is_flat_and_not_nan(double: nn.Module, rng: Generator) -> None:
    stack = Matching.of([observe(double, rng)])
    value, slopes = cosine_distance(stack, {n: torch.zeros_like(g) for n, g in stack.target.items()})
    assert value.tolist() == [1.0]
    assert all(bool(torch.isfinite(s).all()) for s in slopes.values())


def looking_at_values(gradient: Params) -> Params:
    return {n: g * (2.0 if g.sum().item() < 1e9 else 0.0) for n, g in gradient.items()}


@pytest.mark.parametrize("simulate", [lambda g: {n: 2.0 * v for n, v in g.items()}, looking_at_values])
def test_the_server_can_simulate_the_defence_on_its_trial(
    double: nn.Module, rng: Generator, simulate: Callable[[Params], Params]
) -> None:
    seen = observe(double, rng, simulate=simulate).only("5.*")
    x, y = torch.rand(3, 1, 1, 8, 8).double(), torch.rand(3, 1, 5).double()
    plain = trial_gradients(double, ["5.weight", "5.bias"])(x, y)
    found = Matching.of([seen]).trial(x, y)
    for n, value in plain.items():
        torch.testing.assert_close(found[n], 2 * value)


def test_several_steps_are_matched_as_their_mean(double: nn.Module, rng: Generator) -> None:
    seen = observe(double, rng)
    several = replace(seen, update=replace(seen.update, num_steps=4))
    torch.testing.assert_close(Matching.of([several]).target["5.bias"][0], seen.update.gradient["5.bias"] / 4)


def test_problems_are_grouped_by_what_they_must_share(double: nn.Module, rng: Generator) -> None:
    a, b = observe(double, rng), observe(double, rng).without("5.*")
    other = observe(nn.Sequential(nn.Flatten(), nn.Linear(64, 5)), rng)
    two = replace(a, update=replace(a.update, num_examples=2))
    assert stack_key(a) == stack_key(b)
    assert len({stack_key(s) for s in (a, other, b, two)}) == 3


def test_taking_rows_repeats_and_drops_problems(double: nn.Module, rng: Generator) -> None:
    a, b = observe(double, rng), observe(double, rng).without("5.weight")
    stack = Matching.of([a, b]).take(torch.tensor([1, 1, 0]))
    assert len(stack) == 3
    assert stack.weights["5.weight"].flatten(1).any(1).tolist() == [False, False, True]
    torch.testing.assert_close(stack.target["5.bias"][2], a.update.gradient["5.bias"])


def test_an_update_that_does_not_fit_is_refused(double: nn.Module, rng: Generator) -> None:
    seen = observe(double, rng)
    nothing = replace(seen, weights={n: torch.zeros_like(g) for n, g in seen.update.gradient.items()})
    with pytest.raises(AttackError, match="nothing to match"):
        Matching.of([nothing])
    seen.update.gradient["5.bias"][0] = torch.nan
    with pytest.raises(UpdateError, match="NaN"):
        Matching.of([seen])
