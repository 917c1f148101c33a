"""Reconstruction robustness against plain facts: no noise, no promise; much noise, no better than a guess."""

import builtins
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm as normal

from gradveil.errors import CertificateError, MissingExtraError
from gradveil.privacy.bounds import GaussianTraining, rero, rero_gaussian

GUESS = st.floats(1e-6, 0.5)


@given(GUESS, st.floats(0.01, 50), st.integers(1, 100))
def test_noise_never_helps_the_server_below_its_guess_and_never_above_certainty(k: float, ratio: float, t: int) -> None:
    assert k <= rero_gaussian(k, ratio, t) <= 1
    assert rero_gaussian(k, ratio, t) <= rero_gaussian(k, ratio, t + 1) + 1e-15
    assert rero_gaussian(k, 1e-9) == pytest.approx(k, rel=1e-6)
    assert rero_gaussian(k, ratio, 4) == pytest.approx(rero_gaussian(k, 2 * ratio))  # four looks halve the noise


def test_the_gaussian_form_is_what_the_best_test_reaches() -> None:
    # Two candidates; the server sees x plus noise and answers by likelihood: it is right with chance Φ(Δ / 2σ).
    # With κ = 1/2 the bound compares with "left out": half the distance, so it must not be below that success rate.
    rng = torch.Generator().manual_seed(0)
    sigma, n = 0.7, 200_000
    which = torch.randint(0, 2, (n,), generator=rng)
    sent = which.double() - 0.5 + sigma * torch.randn(n, generator=rng, dtype=torch.float64)
    right = ((sent > 0) == (which == 1)).double().mean()
    assert float(right) == pytest.approx(normal.cdf(0.5 / sigma), abs=3e-3)
    assert float(right) <= rero_gaussian(0.5, 0.5 / sigma) + 3e-3


def test_epsilon_and_delta_bound_the_chance() -> None:
    assert rero(0.01, 0.0) == 0.01
    assert rero(0.01, log(5), 1e-3) == pytest.approx(0.051)
    assert rero(0.01, 1e9) == 1.0
    assert rero(0.01, 3.0) == pytest.approx(0.01 * exp(3))


@pytest.mark.parametrize("guess", [0.0, 1.0, -1.0])
def test_a_guess_is_a_chance(guess: float) -> None:
    with pytest.raises(CertificateError, match="blind guess"):
        rero(guess, 1.0)


def test_settings_are_checked() -> None:
    for settings in ((0.0, 0.1, 1), (1.0, 0.0, 1), (1.0, 1.5, 1), (1.0, 0.1, 0)):
        with pytest.raises(CertificateError, match="noise must be above 0"):
            GaussianTraining(*settings)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"gradveil\[certify\]"):
        GaussianTraining(1.0, 0.1, 10).epsilon(1e-5)


def test_the_accountants_agree_and_the_profile_gives_the_closed_form() -> None:
    dp = pytest.importorskip("dp_accounting")
    training = GaussianTraining(2.0, 1.0, 4)
    renyi = dp.rdp.RdpAccountant().compose(dp.GaussianDpEvent(2.0), 4)
    assert training.epsilon(1e-5) <= renyi.get_epsilon(1e-5) * 1.001
    nearly = GaussianTraining(2.0, 1 - 1e-9, 4)  # sampled in name only: the profile against the closed form
    for guess in (0.01, 0.9):  # for a likely guess the best ε is below 0
        assert nearly.reconstruction(guess) == pytest.approx(training.reconstruction(guess), rel=0.02)
    stated = " ".join(nearly.reconstruction(0.01).assumptions)
    assert "Adjacency" in stated
    assert "Side knowledge" in stated
    sampled = GaussianTraining(2.0, 0.05, 4)
    assert 0.01 < sampled.reconstruction(0.01) < training.reconstruction(0.01)


@pytest.mark.filterwarnings("ignore")
def test_opacus_agrees_and_what_it_counted_can_be_certified() -> None:
    accountants = pytest.importorskip("opacus.accountants")
    training = GaussianTraining(noise=1.0, sampling_rate=0.01, steps=300)
    theirs = accountants.PRVAccountant()
    theirs.history = [(1.0, 0.01, 300)]
    assert theirs.get_epsilon(1e-5) == pytest.approx(training.epsilon(1e-5), rel=0.02)
    counted = accountants.RDPAccountant()
    for _ in range(300):
        counted.step(noise_multiplier=1.0, sample_rate=0.01)
    assert GaussianTraining.of_opacus(counted) == training
    stopped = SimpleNamespace(history=[(1.0, 0.01, 100), (1.0, 0.01, 200)])
    assert GaussianTraining.of_opacus(stopped) == training
    counted.step(noise_multiplier=2.0, sample_rate=0.01)
    with pytest.raises(CertificateError, match="2 stretches"):
        GaussianTraining.of_opacus(counted)
