"""The numbers: intervals that cover, bounds that no sound mechanism beats, seeds and grain that are found."""

import numpy as np
import pytest
import torch
from scipy.stats import nct

from gradveil.verification.verify import Guessed, fit, from_outputs, grain, guess, interval, reused, seed_of


def drawn(rng: np.random.Generator, trials: int, count: int, mu: float, *, base: float = 0.0) -> tuple[np.ndarray, ...]:
    """Scores of canaries that hang together, under a mechanism that is exactly μ-Gaussian-DP."""
    u = rng.normal(size=(count, 200)) + 0.8 * rng.normal(size=200)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    present = rng.random((trials, count)) < 0.5
    released = 3 * mu * present @ u + 3 * rng.normal(size=(trials, 200)) + base * rng.normal(size=200)
    return released @ u.T, np.broadcast_to(u @ u.T, (trials, count, count)), present


@pytest.mark.parametrize(("trials", "base"), [(40, False), (40, True), (1, False)])
@pytest.mark.parametrize("mu", [0.2, 1.0, 5.0])
def test_the_interval_covers_mu_as_often_as_it_says(trials: int, base: bool, mu: float) -> None:
    rng, hits, runs = np.random.default_rng(0), 0, 300
    for _ in range(runs):
        scores, grams, present = drawn(rng, trials, 24, mu, base=5.0 * base)
        found = fit(scores, grams, present, base, 0.9)
        hits += found.low <= mu <= found.high
    assert 0.85 < hits / runs < 0.95  # 0.9 ± 3 standard deviations


def test_the_worst_of_many_canaries_stays_under_mu_as_often_as_it_says() -> None:
    rng, over = np.random.default_rng(1), 0
    for _ in range(300):
        over += fit(*drawn(rng, 40, 24, 1.0), False, 0.9).worst_low > 1.0
    assert over / 300 < 0.09  # one side of 10 %, and three standard deviations


def test_a_single_leaking_canary_is_found_and_the_average_hides_it() -> None:
    rng = np.random.default_rng(2)
    scores, grams, present = drawn(rng, 64, 32, 1.5)
    scores = scores + 1.5 * 3 * 1.5 * present[:, :1] * grams[:, 0]  # one record counts 2.5 times
    found = fit(scores, grams, present, False, 0.99)
    assert found.low < 1.6
    assert found.worst_low > 2.0


def test_the_normal_form_is_that_of_the_noncentral_t() -> None:
    for t, degrees in ((0.5, 60), (3.0, 60), (20.0, 500)):
        _, low, high = interval(np.array(t), np.array(1.0), 1.0, degrees, 0.98)
        assert nct.sf(t, degrees, float(high)) == pytest.approx(0.99, abs=2e-3)
        if low > 0:
            assert nct.sf(t, degrees, float(low)) == pytest.approx(0.01, abs=2e-3)


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.0])
def test_bounds_from_guesses_are_under_mu_and_not_empty(mu: float) -> None:
    from gradveil.privacy.bounds import delta_of

    rng, over, runs, lows = np.random.default_rng(3), 0, 60, []
    for _ in range(runs):
        scores, grams, present = drawn(rng, 32, 32, mu)
        made = guess(from_outputs(scores, grams, mu), present)
        lows.append(made.mu_low(0.95))
        over += lows[-1] > mu
        epsilon = made.epsilon_low(1e-5, 0.95)
        assert epsilon == 0 or delta_of(mu, epsilon) > 1e-5 or over
    assert over <= 0.05 * runs + 3 * (0.05 * runs) ** 0.5
    assert float(np.mean(lows)) > 0.25 * mu


def test_guesses_that_are_chance_refute_nothing_and_perfect_ones_much() -> None:
    assert Guessed(1000, 200, 100).mu_low(0.99) == 0
    assert Guessed(1000, 200, 100).epsilon_low(1e-5, 0.99) == 0
    assert Guessed(1000, 1000, 1000).mu_low(0.99) > 1.9
    assert Guessed(1000, 1000, 1000).epsilon_low(0.0, 0.99) == pytest.approx(5.37, abs=0.1)  # log(-n / log 0.01)


@pytest.mark.parametrize("z", [1.0, 100.0])
def test_torchs_normals_have_a_grain_for_the_right_candidate_alone(z: float) -> None:
    rng = torch.Generator().manual_seed(1)
    right, wrong = torch.randn(2, 4000, generator=rng).mul(0.01).unbind()
    released = (right + z * torch.empty(4000).normal_(generator=rng)).double()
    assert grain((released - right).numpy(), [0]) > 8
    assert abs(grain((released - wrong).numpy(), [0])) < 5


def test_a_public_grid_is_no_grain() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        released = np.round(rng.normal(size=4000) * 16) / 16
        assert abs(grain(released, [0])) < 6
        assert abs(grain(released - rng.normal(size=4000) * 0.01, [0])) < 6


def test_the_seed_of_todays_generator_is_found_and_no_seed_of_other_noise() -> None:
    noise = torch.empty(100).normal_(generator=torch.Generator().manual_seed(70_123)) * 7
    assert seed_of(noise.double().numpy(), [0], range(80_000)) == 70_123
    assert seed_of(noise.double().numpy(), [0], range(70_000)) is None
    after = torch.Generator().manual_seed(9 + 2**32)  # only 32 bits are kept
    torch.randperm(40, generator=after)
    shuffled = torch.empty(100).normal_(generator=after).double().numpy()
    assert seed_of(shuffled, [0], range(10), (0, 39)) == 9
    other = np.random.default_rng(0).normal(size=100)
    assert seed_of(other, [0], range(100_000)) is None


def test_noise_that_comes_twice_shows() -> None:
    rng = np.random.default_rng(0)
    one, two, other = rng.normal(size=(3, 500))
    assert reused([one, two, other]) < 6
    assert reused([one, two, one + 0.5 * other]) > 6
