"""The account over a run: it composes, other accountants agree, the best test meets it, and nothing is overspent."""

import json
import threading
from math import inf, sqrt
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri

from gradveil.errors import BudgetError, CertificateError
from gradveil.privacy.accountant import Account, spend_from
from gradveil.privacy.bounds import delta_of, epsilon_of, mu_of, water_filling
from gradveil.privacy.plan import PlannedRun


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=20), st.floats(1e-9, 0.5))
def test_squares_add_up_and_more_rounds_never_cost_less(costs: list[float], delta: float) -> None:
    account = Account("a")
    for cost in costs:
        after = account.spend(cost)
        assert after.mu**2 == pytest.approx(account.mu**2 + cost)
        assert after.epsilon(delta) >= account.epsilon(delta)
        assert after.guess(0.01) >= account.guess(0.01) >= 0.01 - 1e-12
        assert after.floor([3.0, 1.0]) <= account.floor([3.0, 1.0]) <= 4.0
        assert after.rho == pytest.approx(after.mu**2 / 2)
        assert after.z_run == pytest.approx(1 / after.mu)
        account = after


@pytest.mark.parametrize(("z", "rounds"), [(2.0, 20), (0.5, 1), (10.0, 200)])
def test_epsilon_agrees_with_dp_accounting(z: float, rounds: int) -> None:
    distribution = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    account = Account("a")
    for _ in range(rounds):
        account = account.spend(1 / z**2)
    theirs = distribution.from_gaussian_mechanism(z).self_compose(rounds).get_epsilon_for_delta(1e-5)
    assert account.epsilon(1e-5) == pytest.approx(theirs, rel=0.01)
    assert account.epsilon(1e-5) <= theirs * (1 + 1e-6)  # theirs are upper bounds


@given(st.floats(1e-2, 1e3), st.floats(1e-8, 1e-2))
def test_epsilon_and_mu_undo_each_other(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    assert epsilon_of(mu, delta) == pytest.approx(epsilon, rel=1e-6)
    assert delta_of(mu, epsilon) <= delta


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0])
def test_a_delta_is_a_chance(delta: float) -> None:
    with pytest.raises(CertificateError, match="delta="):
        epsilon_of(1.0, delta)


def test_the_best_test_meets_the_guess_bound() -> None:
    # Nine rounds; the server knows all but whether the record's gradient, of length C = 1, or nothing is in the sums.
    z, rounds, kappa = 4.0, 9, 0.01
    noise = z * normal(rounds, 200_000)
    likelihood = (noise + 1).sum(0) / (z * sqrt(rounds))  # by Neyman and Pearson, up to a constant
    right = float((likelihood > -ndtri(kappa)).double().mean())
    bound = Account("a", spent=rounds / z**2).guess(kappa)
    assert right == pytest.approx(bound, abs=2e-3)


@pytest.mark.parametrize("z", [0.3, 1.0, 3.0])
def test_no_estimator_of_a_gaussian_record_gets_under_the_floor(z: float) -> None:
    # The gradient is the record itself, clipped; the best estimator is the posterior mean, by weighted draws.
    scale = torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64)
    drawn, x = scale * normal(10_000, 3), scale * normal(200, 3, seed=1)
    clip = 1.0

    def clipped(v: torch.Tensor) -> torch.Tensor:
        return v * (clip / v.norm(dim=1, keepdim=True)).clamp(max=1)

    sent = clipped(x) + z * clip * normal(200, 3, seed=2)
    apart = (torch.cdist(sent, clipped(drawn)) / (z * clip)).square()
    error = float((torch.softmax(-apart / 2, 1) @ drawn - x).square().sum(1).mean())
    floor = Account("a", spent=1 / z**2).floor(scale.square())
    assert floor < error < 1.15 * float(scale.square().sum())


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=12), st.floats(0, 20))
def test_water_fills_to_the_level_that_the_information_allows(eigenvalues: list[float], rho: float) -> None:
    low, high = 0.0, max(eigenvalues)
    values = torch.tensor(eigenvalues, dtype=torch.float64)
    for _ in range(200):
        level = (low + high) / 2
        used = 0.5 * float((values / max(level, 1e-300)).log().clamp(min=0).sum())
        low, high = (level, high) if used > rho else (low, level)
    assert water_filling(eigenvalues, rho) == pytest.approx(float(values.clamp(max=high).sum()), rel=1e-6)


def test_nothing_known_leaves_the_blind_guess_and_everything_known_leaves_nothing() -> None:
    assert water_filling([2.0, 1.0, 0.0], 0.0) == pytest.approx(3.0)
    assert water_filling([2.0, 1.0], inf) == 0.0
    with pytest.raises(CertificateError, match="covariance"):
        water_filling([-1.0], 1.0)


def test_the_round_that_would_overspend_is_refused_in_one_line() -> None:
    account = Account("ward-3", limit=1.0)
    for _ in range(10):  # 10 x 0.1 rounds to less than 1, and to more in another order
        account = account.spend(0.1)
    with pytest.raises(
        BudgetError, match=r"Client ward-3 has spent μ² = 1 of 1, and this round costs 0.1: nothing is s"
    ):
        account.spend(0.1)
    for cost in (0.0, -1.0, inf, float("nan")):
        with pytest.raises(BudgetError, match="nothing is sent"):
            Account("a").spend(cost)


def test_a_clients_file_is_paid_from_before_a_round_and_refuses_another_client(tmp_path: Path) -> None:
    path = tmp_path / "new" / "budget.json"
    assert spend_from(path, "a", 0.5, limit=1.0).spent == 0.5
    assert spend_from(path, "a", 0.5, limit=9.0).limit == 1.0  # a limit cannot be raised by the next round
    with pytest.raises(BudgetError, match="has spent"):
        spend_from(path, "a", 0.5)
    assert Account.read(path, "a") == Account.read(str(path), "a") == Account("a", 1.0, 1.0)
    Account("b").save(str(tmp_path / "b.json"))
    assert Account.read(tmp_path / "b.json", "b").spent == 0
    with pytest.raises(BudgetError, match="of client a, not of b: nothing is sent"):
        spend_from(path, "b", 0.1)
    wrong = [json.dumps({"client": "a", "spent": spent, "limit": None}) for spent in (-1, 10**400, "much")]
    for text in ("", "[]", 9000 * "[", '{"client": "a"}', *wrong):
        path.write_text(text)
        with pytest.raises(BudgetError, match="othing is sent"):
            spend_from(path, "a", 0.1)


def test_two_rounds_at_once_pay_twice(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    payers = [threading.Thread(target=spend_from, args=(path, "a", 0.125)) for _ in range(8)]
    for payer in payers:
        payer.start()
    for payer in payers:
        payer.join()
    assert Account.read(path, "a").spent == 1.0


def test_re_cut_batches_cost_more_than_a_zeroed_slot() -> None:
    # A record that is taken out, not zeroed, moves every later one: each later batch loses one and gains another.
    z, batches, size = 5.0, 6, 4
    records = torch.ones(batches * size)
    records[:: 2 * size] = -1.0  # the first of every other batch points the other way

    def apart(other: torch.Tensor) -> float:
        return float((records.view(batches, size).sum(1) - other.view(batches, size).sum(1)).norm()) / z

    zeroed = records.clone()
    zeroed[0] = 0.0
    assert apart(zeroed) == pytest.approx(Account("a", spent=1 / z**2).mu)
    recut = torch.cat([records[1:], records.new_zeros(1)])
    claimed, cost = Account("a", spent=1 / z**2).mu, sqrt(4 * (batches - 1) + 1) / z
    assert apart(recut) == pytest.approx(cost)
    assert cost > 4 * claimed


def test_several_local_steps_under_secure_aggregation_lean_on_one_clients_noise() -> None:
    # Each of K clients adds z C / sqrt(K). Its second step's other records turn with the sign of its first step.
    cohort, slots, z, clip, draws = 1000, 100, 10.0, 1.0, 400_000
    own, rest = normal(2, draws), normal(2, draws, seed=1)
    told = []
    for present in (0.0, 1.0):
        first = present * clip + z * clip / sqrt(cohort) * own[0] - 0.5 * clip
        second = (slots - 1) * clip * torch.where(first > 0, 1.0, -1.0)
        seen = second + z * clip * rest[int(present)]  # of the sum: all clients' noise
        told.append(float((seen > 0).double().mean()))
    measured = ndtri(told[1]) - ndtri(told[0])
    assert measured == pytest.approx(sqrt(cohort) / z, rel=0.02)  # 3.16, where 1 / z = 0.1 seems to be bought
    run = PlannedRun(2 * slots, slots, 1, rounds=1, participations=1, cohort=cohort)
    with pytest.raises(CertificateError, match="one noisy release a round, and a round here has 2 local steps"):
        run.check_tier("aggregate")
