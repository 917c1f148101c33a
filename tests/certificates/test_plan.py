"""From a promise to the noise: over the whole run, for what a server sees, and not where the theorem does not hold."""

from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradveil.data import load
from gradveil.errors import CertificateError
from gradveil.federated.client import step_gradient
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import TWO_POINTS, Plan, PlannedRun, class_spectra, floor_share, z_run_of
from gradveil.protection.defense import build
from gradveil.tree import flatten
from gradveil.types import Batch


def planned(**changed: Any) -> PlannedRun:
    """Return the paper's split: 10 of 100 devices with 200 records, 200 rounds."""
    settings: dict[str, Any] = {"records": 200, "batch_size": None, "epochs": 1, "rounds": 200, "participations": 20}
    return PlannedRun(**settings | {"cohort": 10} | changed)


def test_a_promise_is_for_the_whole_run() -> None:
    run = planned(epochs=2)
    plan = Plan(run, run.z(z_run_of("reconstruction")))
    assert plan.z == pytest.approx(0.5 * sqrt(2 * 20))
    assert plan.account.z_run == pytest.approx(0.5)
    assert plan.account.rho == pytest.approx(2.0)
    assert z_run_of("identification") == 1.0
    assert z_run_of(rho=0.5) == pytest.approx(1.0)
    assert Plan(run, run.z(z_run_of(epsilon=8, delta=1e-5))).account.epsilon(1e-5) == pytest.approx(8, rel=1e-6)


def test_secure_aggregation_splits_the_noise_among_those_who_stay_and_are_honest() -> None:
    run = planned(lost=0.2, colluding=0.3)
    local, split = (Plan(run, 2.0, tier, 10_000) for tier in ("local", "aggregate"))  # type: ignore[arg-type]
    assert local.client_z == 2.0
    assert split.client_z == pytest.approx(2.0 / sqrt(5))
    assert run.min_clients == 8
    assert planned(lost=0.1).min_clients == 9
    assert planned().min_clients == 10
    assert local.account == split.account
    whole = Plan(planned(), 2.0, "aggregate", 10_000)
    assert whole.noise_to_signal == pytest.approx(2.0 * sqrt(10_000) / (10 * 200))
    assert Plan(planned(), 2.0, "local", 10_000).noise_to_signal == pytest.approx(2.0 * 100 / (200 * sqrt(10)))


@pytest.mark.parametrize("tier", ["local", "aggregate"])
def test_the_noise_is_that_of_clients_who_stay(tier: Any) -> None:
    """It had been that of a whole cohort: with half of it lost the mean has √2 times the noise."""
    run = planned(cohort=20, lost=0.5, colluding=0.2, records=4)
    plan = Plan(run, 3.0, tier, 2_000)
    rng = torch.Generator().manual_seed(0)
    mean = plan.client_z * torch.randn(10, 2_000, generator=rng).mean(0) / 4  # ten stay, colluding or not
    assert plan.noise_to_signal == pytest.approx(float(mean.norm()), rel=0.05)
    assert plan.client_z == pytest.approx(3.0 if tier == "local" else 3.0 / sqrt(20 * 0.3))


@given(st.floats(0, 0.6), st.floats(0, 0.3), st.sampled_from(["local", "aggregate"]), st.floats(0.01, 100))
def test_the_cheapest_cohort_is_one_that_can_be(lost: float, colluding: float, tier: Any, z: float) -> None:
    shares = {"lost": lost, "colluding": colluding}
    found = Plan(planned(cohort=50, **shares), z, tier, 10_000).cheap_from
    assert found is not None
    ratio = Plan(planned(cohort=found, **shares), z, tier, 10_000).noise_to_signal
    assert ratio is not None
    assert ratio <= TWO_POINTS * (1 + 1e-6)


@pytest.mark.parametrize("tier", ["local", "aggregate"])
def test_the_cohort_that_makes_it_cheap_is_just_that(tier: Any) -> None:
    plan = Plan(planned(), 30.0, tier, 1_000_000)
    found = plan.cheap_from
    assert found is not None
    assert found > 10
    cheap, dear = (Plan(planned(cohort=k), 30.0, tier, 1_000_000).noise_to_signal for k in (found, found - 1))
    assert cheap is not None
    assert dear is not None
    assert cheap <= TWO_POINTS * (1 + 1e-9) < dear
    assert Plan(planned(), 30.0, tier).noise_to_signal is None


def test_the_floor_is_a_share_of_the_blind_guess() -> None:
    spectra = [torch.tensor([1.0, 0.5, 0.1]), torch.tensor([2.0, 0.0, 0.0])]
    shares = [floor_share(Plan(planned(), z, "local").account, spectra) for z in (0.5, 5.0, 500.0)]
    assert 0 <= shares[0] < shares[1] < shares[2] <= 1
    assert shares[2] > 0.99


def test_a_server_with_two_candidates_gets_far_below_the_floor_for_gaussian_images() -> None:
    """Why the floor is called one for Gaussian images; the bound on guessing holds, and is met."""
    digits, account, rng = load("digits"), Account("a", spent=4.0), torch.Generator().manual_seed(0)
    floor = floor_share(account, class_spectra(digits.test.batch(slice(None))).values())
    some = digits.train.batch(slice(0, 50))
    pair = some.inputs[some.labels == 0][:2]  # the record is one of these, as likely as the other, and of one class
    apart, middle = (pair[0] - pair[1]).flatten(), pair.mean(0).flatten()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Linear(1, 10))
    model.load_state_dict({  # chosen weights: 100 for the first and -100 for the second, and both are held for a 1
        "1.weight": 200 * apart[None] / apart.square().sum(),
        "1.bias": -200 * (apart @ middle)[None] / apart.square().sum(),
        "2.weight": torch.zeros(10, 1),
        "2.bias": 100 * torch.eye(10)[1],
    })  # fmt: skip
    clean, noisy = build("veil:z=1e-9,clip=1"), build("veil:z=0.5,clip=1")  # one release is the whole run
    sums = torch.stack([flatten(step_gradient(model, _zero(x), clean, rng)) for x in pair])
    errors = []
    for number in range(400):
        x = pair[number % 2]
        sent = flatten(step_gradient(model, _zero(x), noisy, rng))
        belief = torch.softmax(-(sent - sums).square().sum(1) / (2 * 0.5**2), 0)
        errors.append((belief[0] * pair[0] + belief[1] * pair[1] - x).square().sum() / (apart / 2).square().sum())
    error = torch.stack(errors)
    assert floor > 0.5
    assert float(error.mean()) < 0.2 < floor / 2
    assert float((error < 1).float().mean()) == pytest.approx(account.guess(0.5), abs=0.03)


def _zero(image: Tensor) -> Batch:
    return Batch(image[None], torch.tensor([0]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"participations": 201}, "participations=201 exceed rounds=200"),
        ({"records": 0}, "records=0: a run needs at least one"),
        ({"batch_size": 0}, "batch_size=0: a run needs at least one"),
        ({"lost": 1.0}, "leave some of it"),
        ({"lost": -0.1}, "leave some of it"),
    ],
)
def test_a_run_that_cannot_be_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        planned(**wrong)


@pytest.mark.parametrize(
    ("run", "z", "tier", "words"),
    [
        ({}, 0.0, "local", "z=0.0: the noise multiplier must be above 0"),
        ({}, -1.0, "local", "must be above 0"),
        ({"cohort": 1}, 1.0, "aggregate", "cohort of 1 .* hides nothing"),
        ({"lost": 0.5, "colluding": 0.4}, 1.0, "aggregate", "hides nothing"),
        ({"batch_size": 32}, 1.0, "aggregate", "a round here has 7 local steps"),
        ({"epochs": 2}, 1.0, "aggregate", "a round here has 2 local steps"),
    ],
)
def test_a_plan_that_buys_nothing_is_refused(run: dict[str, Any], z: float, tier: Any, words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        Plan(planned(**run), z, tier)


@pytest.mark.parametrize(
    ("promise", "words"),
    [
        ({}, "Give one promise"),
        ({"promise": "reconstruction", "rho": 1.0}, "Give one promise"),
        ({"promise": "everything"}, "'everything' is not known"),
        ({"rho": 0.0}, "rho=0.0"),
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta=0.0"),
    ],
)
def test_a_promise_that_says_nothing_is_refused(promise: dict[str, Any], words: str) -> None:
    with pytest.raises(CertificateError, match=words):
        z_run_of(**promise)
