"""The leak meter: exact for linear Gaussian models, blind to nothing, and low when it stops early."""

from typing import Any

import pytest
import torch
from torch import Generator, nn
from torch.func import functional_call, grad, jacrev

from gradveil.threats import meter
from gradveil.threats.meter import (
    bayes_mse,
    equations,
    flat_prior,
    information,
    leak_meter,
    overstated,
    probed_mse,
)
from gradveil.tree import Params, parameters
from gradveil.types import Batch, GaussianPrior, Observation, Update


@pytest.fixture
def small() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(75, 4)
        ).requires_grad_()  # fmt: skip


@pytest.fixture
def truth(rng: Generator) -> Batch:
    return Batch(torch.rand(1, 1, 5, 5, generator=rng), torch.tensor([2]))


@pytest.fixture
def prior(rng: Generator) -> GaussianPrior:
    return GaussianPrior.fit(torch.rand(60, 25, generator=rng) * 0.5 + 0.25, ridge=1e-3)


def observe(model: nn.Module, truth: Batch, **settings: object) -> Observation:
    gradient = step(model, parameters(model), truth)
    shape = tuple(truth.inputs.shape[1:])
    return Observation(model, Update(gradient, len(truth)), shape, 4, truth.labels, **settings)  # type: ignore[arg-type]


def step(model: nn.Module, weights: Params, truth: Batch) -> Params:
    found: Params = grad(
        lambda w: nn.functional.cross_entropy(functional_call(model, w, (truth.inputs,)), truth.labels)
    )(weights)
    return found


def dense(model: nn.Module, truth: Batch, names: list[str]) -> torch.Tensor:
    weights = {n: p.double() for n, p in parameters(model).items()}

    def send(x: torch.Tensor) -> torch.Tensor:
        sent = step(model, weights, Batch(x, truth.labels))
        return torch.cat([sent[n].reshape(-1) for n in names])

    return jacrev(send)(truth.inputs.double()).flatten(1)


def test_the_figures_are_those_of_the_dense_jacobian(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    names = list(parameters(small))
    seen = observe(small, truth, noise=dict.fromkeys(names, 0.02))
    leak = leak_meter(seen, truth, prior, floor=0.0)
    k = dense(small, truth, names)
    fisher = k.T @ k / 0.02**2
    expected = torch.linalg.inv(fisher + torch.linalg.inv(prior.covariance().double())).trace() / 25
    assert leak.mse == pytest.approx(float(expected), rel=1e-6)
    assert leak.rank == 25
    assert leak.influence == pytest.approx(float(0.02**2 * torch.linalg.inv(k.T @ k).trace() / 25), rel=1e-6)
    assert leak.mse < leak.influence
    assert leak.mse < leak.prior_mse
    assert leak.prior_mse == pytest.approx(float(prior.covariance().trace() / 25), rel=1e-6)


def test_it_is_the_error_of_the_best_estimator_in_a_linear_gaussian_world(prior: GaussianPrior, rng: Generator) -> None:
    k = torch.randn(10, 25, generator=rng, dtype=torch.float64)
    noise, cov = 0.3, prior.covariance().double()
    x = torch.randn(40_000, 25, generator=rng, dtype=torch.float64) @ torch.linalg.cholesky(cov).T
    sent = x @ k.T + noise * torch.randn(40_000, 10, generator=rng, dtype=torch.float64)
    best = cov @ k.T @ torch.linalg.inv(k @ cov @ k.T + noise**2 * torch.eye(10, dtype=torch.float64))
    reached = (sent @ best.T - x).square().mean()
    assert bayes_mse(k.T @ k / noise**2, prior) == pytest.approx(float(reached), rel=0.02)


def test_seeing_less_or_through_more_noise_never_leaks_more(
    small: nn.Module, truth: Batch, prior: GaussianPrior
) -> None:
    seen = observe(small, truth)
    whole = leak_meter(seen, truth, prior).mse
    for less in (seen.without("3.weight"), seen.only("0.*"), seen.only("3.bias")):
        assert leak_meter(less, truth, prior).mse >= whole * (1 - 1e-9)
    levels = [
        leak_meter(observe(small, truth, noise=dict.fromkeys(parameters(small), s)), truth, prior).mse
        for s in (1e-3, 1e-2, 0.1, 10)
    ]
    assert levels == sorted(levels)
    assert levels[-1] == pytest.approx(leak_meter(seen, truth, prior).prior_mse, rel=1e-2)


def test_entries_of_weight_zero_are_not_seen(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    seen = observe(small, truth)
    masked = observe(small, truth, weights={"3.weight": torch.zeros(4, 75)})
    assert leak_meter(masked, truth, prior).mse == pytest.approx(leak_meter(seen.without("3.weight"), truth, prior).mse)
    half = torch.ones(4, 75)
    half[:, ::2] = 0
    some = leak_meter(observe(small, truth, weights={"3.weight": half}).only("3.weight"), truth, prior)
    assert leak_meter(seen.only("3.weight"), truth, prior).mse < some.mse < some.prior_mse


def test_a_bias_alone_leaves_directions_unseen(small: nn.Module, truth: Batch) -> None:
    leak = leak_meter(observe(small, truth).only("3.bias"), truth)
    assert leak.rank is not None
    assert leak.rank <= 3  # four numbers that sum to zero
    assert leak.influence == float("inf")


def test_probes_agree_with_the_exact_trace_and_err_low_when_stopped(
    small: nn.Module, truth: Batch, prior: GaussianPrior
) -> None:
    seen = observe(small, truth, noise=dict.fromkeys(parameters(small), 0.05))
    exact = leak_meter(seen, truth, prior, floor=0.0).mse
    probed = leak_meter(seen, truth, prior, floor=0.0, exact_limit=1, probes=200, steps=40)
    assert probed.rank is None
    assert probed.low is not None
    assert probed.low < exact < probed.prior_mse
    assert probed.mse == pytest.approx(exact, rel=0.1)
    system = equations(seen, truth, 0.0)
    by_steps = [
        probed_mse(system.information, prior, system.x, 20, steps, torch.Generator().manual_seed(0))
        for steps in (1, 2, 4, 8, 30)
    ]
    assert by_steps == sorted(by_steps)


def test_products_with_the_information_match_the_matrix(small: nn.Module, truth: Batch, rng: Generator) -> None:
    system = equations(observe(small, truth), truth)
    v = torch.randn(3, 25, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(system.information(v), v @ information(system))


def test_a_batch_is_metered_example_by_example_in_the_prior(
    small: nn.Module, prior: GaussianPrior, rng: Generator
) -> None:
    batch = Batch(torch.rand(3, 1, 5, 5, generator=rng), torch.tensor([0, 1, 3]))
    leak = leak_meter(observe(small, batch), batch, prior)
    alone = Batch(batch.inputs[:1], batch.labels[:1])
    assert leak.unknowns == 75
    assert leak_meter(observe(small, alone), alone, prior).mse < leak.mse < leak.prior_mse
    probed = leak_meter(observe(small, batch), batch, prior, exact_limit=1, probes=64, steps=100)
    assert probed.mse == pytest.approx(leak.mse, rel=0.2)


def test_rounds_add_information(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    seen = observe(small, truth, noise=dict.fromkeys(parameters(small), 0.1))
    single = leak_meter(seen, truth, prior).mse
    told = information(equations(seen, truth, 1e-3))
    assert bayes_mse(4 * told, prior) < single
    assert bayes_mse(told, prior) == pytest.approx(single)


def test_few_probes_overstate_a_thin_matrix_and_the_stated_end_of_the_interval_does_not() -> None:
    v = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = float(v.square().sum()) + 40e-6
    z = torch.randint(0, 2, (2000, 8, 40), generator=torch.Generator().manual_seed(1)).double() * 2 - 1
    estimates = (z @ v).square().mean(1) + 40e-6  # the worst kind of matrix: all of the trace in one direction
    assert estimates.max() > 2 * exact
    below = (estimates / overstated(8) <= exact).double().mean()
    assert 0.95 <= below <= 1


def test_a_simulated_defence_is_part_of_the_function(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    def hide(gradient: Params) -> Params:
        return gradient | {"3.weight": 0 * gradient["3.weight"]}

    simulated = observe(small, truth, simulate=hide)
    dropped = observe(small, truth).without("3.weight")
    assert leak_meter(simulated, truth, prior).mse == pytest.approx(leak_meter(dropped, truth, prior).mse)


def test_several_local_steps_are_unrolled(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    one = observe(small, truth)
    update = Update(one.update.gradient, 1, num_steps=3, lr=0.5)
    three = Observation(small, update, (1, 5, 5), 4, truth.labels)
    assert leak_meter(three, truth, prior).mse != pytest.approx(leak_meter(one, truth, prior).mse, rel=1e-3)


def test_without_a_prior_pixels_are_independent_and_uniform(small: nn.Module, truth: Batch) -> None:
    assert leak_meter(observe(small, truth), truth).prior_mse == pytest.approx(1 / 12)
    assert flat_prior(observe(small, truth, bounds=(-1.0, 1.0))).ridge == pytest.approx(4 / 12)


def test_the_meter_leaves_the_global_random_state_alone(small: nn.Module, truth: Batch, prior: GaussianPrior) -> None:
    state = torch.get_rng_state()
    seen = observe(small, truth)
    first = leak_meter(seen, truth, prior, exact_limit=1)
    assert first.mse == leak_meter(seen, truth, prior, exact_limit=1).mse
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("exact_limit", [1024, 1])
def test_a_reading_can_be_watched_and_ended(
    small: nn.Module, truth: Batch, prior: GaussianPrior, exact_limit: int
) -> None:
    class Enough(Exception):
        pass

    def stop() -> None:
        raise Enough

    calls: list[None] = []
    leak_meter(observe(small, truth), truth, prior, exact_limit=exact_limit, each=lambda: calls.append(None))
    assert calls
    with pytest.raises(Enough):
        leak_meter(observe(small, truth), truth, prior, exact_limit=exact_limit, each=stop)


def test_probes_end_where_the_figure_is_settled(
    small: nn.Module, truth: Batch, prior: GaussianPrior, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy, steps = observe(small, truth, noise=dict.fromkeys(parameters(small), 1e-3)), []
    early = leak_meter(noisy, truth, prior, exact_limit=1, each=lambda: steps.append("early"))
    monkeypatch.setattr("gradveil.threats.meter.SETTLED", 0.0)
    late = leak_meter(noisy, truth, prior, exact_limit=1, each=lambda: steps.append("late"))
    assert steps.count("early") < steps.count("late")
    assert early.mse == pytest.approx(late.mse, rel=0.01)
    assert early.mse <= late.mse  # stopped early it errs low


def test_a_jacobian_too_large_to_hold_is_not_written_out(
    small: nn.Module, truth: Batch, prior: GaussianPrior, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradveil.threats.meter.ENTRIES", 100)
    assert leak_meter(observe(small, truth), truth, prior).how.startswith("estimate")


@pytest.mark.parametrize("limit", [1024, 0])  # exact, by probes
def test_at_its_floor_the_figure_is_said_to_say_nothing(
    small: nn.Module, truth: Batch, prior: GaussianPrior, limit: int
) -> None:
    noisy = dict.fromkeys(dict(small.named_parameters()), 0.1)
    assert leak_meter(observe(small, truth), truth, prior, exact_limit=limit).at_floor
    assert not leak_meter(observe(small, truth, noise=noisy), truth, prior, exact_limit=limit).at_floor


@pytest.mark.parametrize("all_gradients", [False, True])
def test_sums_go_by_the_models_order_not_by_that_of_a_set(
    truth: Batch, monkeypatch: pytest.MonkeyPatch, all_gradients: bool
) -> None:
    """A set's order changes from process to process, and with it the last digits of whatever is added up in it."""
    layers = [nn.Flatten(), nn.Linear(25, 4), *(nn.Linear(4, 4) for _ in range(19))]
    model = nn.Sequential(*layers)
    names = [name for name, _ in model.named_parameters()]
    seen = observe(model, truth, simulate=(lambda gradient: gradient) if all_gradients else None)
    assert seen.needs_all_gradients == all_gradients
    given: list[list[str]] = []
    for name in ("unroll", "trial_update"):
        real = getattr(meter, name)
        at = 1 if name == "unroll" else 2

        def noted(*args: Any, real: Any = real, at: int = at) -> Params:
            given.append(list(args[at]))
            found: Params = real(*args)
            return found

        monkeypatch.setattr(meter, name, noted)
    found = equations(seen, truth)
    found.function(found.x)
    assert given == [names, names]
