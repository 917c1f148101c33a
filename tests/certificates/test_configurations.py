"""What configurations of Flower, Opacus and NVFlare buy: their own names, the right sums, and what is off."""

import json
from math import inf, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradveil.errors import CertificateError
from gradveil.privacy.accountant import Account
from gradveil.privacy.bounds import GaussianTraining, beside_a_count
from gradveil.privacy.configurations import Bought, Told, check


def flower(tmp_path: Path, **settings: Any) -> Path:
    """Write a Flower app's pyproject."""
    lines = [f"{key.replace('_', '-')} = {value}" for key, value in settings.items()]
    path = tmp_path / "pyproject.toml"
    path.write_text("\n".join(["[tool.flwr.app.config]", *lines, "[tool.flwr.federations.local]", "options.x = 1"]))
    return path


def saved(tmp_path: Path, content: Any) -> Path:
    """Write a JSON file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return path


def said(one: Bought) -> str:
    """Return all notes."""
    return "\n".join(one.notes)


def test_a_sensitivity_far_below_the_clip_is_called_out(tmp_path: Path) -> None:
    path = flower(tmp_path, num_server_rounds=50, clipping_norm=1.0, sensitivity=1e-4, epsilon=10, delta=1e-5)
    (one,) = check(path)
    assert one.sigma == pytest.approx(4.84e-5, rel=0.01)
    assert one.mu is not None
    assert one.mu**2 / 2 == pytest.approx(2.1e8, rel=0.02)
    assert (one.level, one.against, one.releases) == ("client", "the server", 50)
    assert "the noise is 1e+04 times too small" in said(one)
    assert "epsilon = 10 is not what a round gives: it is 2.13e+08" in said(one)
    assert "Nothing counts the rounds" in said(one)
    assert "a client's whole update" in said(one)
    assert one.account is not None
    assert one.account.spent == pytest.approx(50 * one.mu**2)


def test_the_sums_are_those_of_flowers_mod(tmp_path: Path) -> None:
    mod = pytest.importorskip("flwr.clientapp.mod")
    made = mod.LocalDpMod(clipping_norm=2.0, sensitivity=2.0, epsilon=0.5, delta=1e-5)  # the names are its own
    (one,) = check(flower(tmp_path, **vars(made)))
    assert one.sigma == pytest.approx(2.0 * sqrt(2 * log(1.25 / 1e-5)) / 0.5)
    assert "too small" not in said(one)
    assert "is not what a round gives" not in said(one)  # its rule is safe below 1
    assert "the figures are of one" in said(one)


def test_noise_that_the_server_adds_is_no_promise_against_the_server(tmp_path: Path) -> None:
    path = flower(tmp_path, noise_multiplier=0.2, clipping_norm=10, num_sampled_clients=20, num_server_rounds=30)
    (one,) = check(path)
    assert (one.against, one.mu, one.sigma) == ("others than the server", 5.0, pytest.approx(0.1))
    assert "nothing is promised against the server" in said(one)
    assert "weighs by examples" in said(one)
    assert "Nothing counts the rounds" in said(one)
    (counted,) = check(flower(tmp_path, noise_multiplier=1, clipping_norm=1, num_sampled_clients=2, max_epsilon=8))
    assert "Nothing counts the rounds" not in said(counted)
    (none,) = check(flower(tmp_path, noise_multiplier=0, clipping_norm=1, num_sampled_clients=2))
    assert (none.mu, none.account) == (inf, None)


def test_a_share_of_clients_is_no_limit_on_participation(tmp_path: Path) -> None:
    path = flower(tmp_path, num_server_rounds=50, clipping_norm=1.0, epsilon=1, delta=1e-5, fraction_train=0.1)
    (one,) = check(path)
    assert one.releases == 50
    assert "takes part in 5 of 50 rounds on average" in said(one)
    assert check(path, Told(participations=5))[0].releases == 5


def test_what_opacus_counted_is_of_one_engine(tmp_path: Path) -> None:
    state = {"history": [(10.0, 0.5, 4)], "mechanism": "prv"}
    (one,) = check(saved(tmp_path, state), Told(rounds=2))
    assert (one.level, one.releases) == ("record", 2)
    assert one.epsilon == pytest.approx(GaussianTraining(10.0, 0.5, 8).epsilon(1e-5))
    assert one.mu == pytest.approx(sqrt(2) / 10)  # each record twice a round
    assert "a new one in every round" in said(one)
    assert "secret Poisson batches" in said(one)


def test_opacus_settings_in_a_flower_app(tmp_path: Path) -> None:
    (one,) = check(flower(tmp_path, max_grad_norm=1.0, noise_multiplier=2.0, num_server_rounds=4, local_epochs=3))
    assert one.account is not None
    assert one.account.spent == pytest.approx(4 * 3 / 2**2)
    assert one.epsilon is None  # nothing is sampled
    with pytest.raises(CertificateError, match="noise-multiplier is not in the file"):
        check(flower(tmp_path, max_grad_norm=1.0, target_delta=1e-5))
    (aimed,) = check(flower(tmp_path, max_grad_norm=1.0, target_epsilon=3, target_delta=1e-5, num_server_rounds=4))
    assert aimed.account is not None
    assert aimed.account.epsilon(1e-5) > 3


def test_filters_of_nvflare(tmp_path: Path) -> None:
    chosen = [
        {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"fraction": 0.1, "epsilon": 0.1}},
        {"name": "PercentilePrivacy", "args": {"percentile": 10}},
        {"path": "site.LocalDifferentialPrivacy", "args": {"clipping_norm": 1.0, "epsilon": 1.0, "delta": 1e-5}},
        {"path": "site.Own"},
    ]
    job = {"format_version": 2, "task_result_filters": [{"tasks": ["train"], "filters": chosen}]}
    svt, percentile, local, own = check(saved(tmp_path, job), Told(rounds=10))
    assert (svt.mu, svt.epsilon) == (None, None)
    assert "of choosing the entries alone" in said(svt)
    assert (percentile.mu, percentile.epsilon) == (None, None)
    assert "no promise" in said(percentile)
    assert local.mu == pytest.approx(1 / sqrt(2 * log(1.25 / 1e-5)))
    assert "not known here" in said(own)
    assert "of choosing the entries alone" in said(check(saved(tmp_path, {"a": [job]}))[0])  # however it is nested


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "[tool", "cannot be read as TOML"),
        ("a.json", "", "cannot be read as TOML"),
        ("a.toml", "lr = 0.1", "names no clip and noise that are known here"),
        ("a.toml", "clipping-norm = 0\nepsilon = 1\ndelta = 1e-5", "clipping-norm = 0: it must be above 0"),
        ("a.toml", "clipping-norm = 'much'\nepsilon = 1\ndelta = 1e-5", "'much' is not a number"),
        ("a.toml", "clipping-norm = 1\nepsilon = 1", "delta is not in the file"),
        ("a.toml", "clipping-norm = 1\nnoise-multiplier = -1", "noise-multiplier = -1"),
        ("a.json", '{"history": [1]}', "history is not Opacus's"),
        ("a.json", '{"history": [[1, 0.1, 3], [2, 0.1, 3]]}', "stretches of training"),
    ],
)
def test_a_file_that_says_nothing_is_one_line(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CertificateError, match=words):
        check(tmp_path / name)
    with pytest.raises(CertificateError, match="cannot be read"):
        check(tmp_path / "nowhere.toml")


ENGINE = {"max_grad_norm": 1.0, "noise_multiplier": 1.5, "secure_mode": True}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("records", "size", "settings"),
    [
        (100, 32, {}),
        (100, 32, {"drop_last": True}),
        (186, 2, {}),  # 93 batches, and int(1 / (1 / 93)) is 92: so many are drawn
        (100, 32, {"poisson_sampling": False}),
        (10, 32, {}),
    ],
)
def test_rates_and_steps_are_those_of_opacus(tmp_path: Path, records: int, size: int, settings: dict[str, Any]) -> None:
    """Its rate is one over the batches of an epoch, not batch size over records; with ``drop_last`` that is more."""
    opacus = pytest.importorskip("opacus")
    model = nn.Linear(2, 1)
    data = TensorDataset(torch.ones(records, 2))
    loader = DataLoader(data, batch_size=size, drop_last=settings.get("drop_last", False))
    engine = opacus.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader, max_grad_norm=1.0,
        noise_multiplier=1.5, poisson_sampling=settings.get("poisson_sampling", True),
    )  # fmt: skip
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    counted = GaussianTraining.of_opacus(engine.accountant)
    content = ENGINE | {"batch_size": size, "records": records, "epochs": 2} | settings
    (one,) = check(saved(tmp_path, content))
    drawn = getattr(loader, "sample_rate", counted.sampling_rate)  # what it counts may be more: one over 92, not 93
    assert one.details["sampling_rate"] == pytest.approx(drawn)
    assert drawn <= counted.sampling_rate < 1.02 * drawn
    assert counted.steps <= one.details["steps"] <= counted.steps + 2  # never fewer
    assert one.mu == pytest.approx(sqrt(2) / 1.5)  # twice in turn
    assert one.sigma == pytest.approx(1.5 / optimizer.expected_batch_size)
    if one.epsilon is None:
        assert "counts a gain all the same" in said(one) or counted.sampling_rate == 1
    else:
        assert one.epsilon == pytest.approx(counted.epsilon(1e-5), rel=0.02)


def test_part_of_an_epoch_is_a_use(tmp_path: Path) -> None:
    """1.2 epochs of batches cut in turn use some records twice; they had been rounded to one use."""
    (one,) = check(saved(tmp_path, {"history": [(2.0, 0.1, 12)]}))
    assert one.mu == pytest.approx(sqrt(2) / 2)
    (exact,) = check(saved(tmp_path, {"history": [(2.0, 0.1, 30)]}))  # 30 x 0.1 is 3.0000000000000004
    assert exact.mu == pytest.approx(sqrt(3) / 2)


@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.1, 30), (4.0, 0.02, 500), (0.7, 0.5, 3)])
def test_batches_that_the_server_knows_are_counted_as_they_fall(noise: float, rate: float, steps: int) -> None:
    """Against dp-accounting: each step is a Gaussian with the chance of the rate, else nothing, and which is seen."""
    pytest.importorskip("dp_accounting")
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    whole = privacy_loss_distribution.from_gaussian_mechanism(
        noise, value_discretization_interval=1e-4, use_connect_dots=True
    )._pmf_remove
    losses = whole.to_dense_pmf()
    chances, low = rate * losses._probs, losses._lower_loss
    chances[-low] += 1 - rate  # nothing was used, and nothing is lost
    pmf = pld_pmf.DensePLDPmf(1e-4, low, chances, rate * losses._infinity_mass, True)
    total = privacy_loss_distribution.PrivacyLossDistribution(pmf).self_compose(steps)
    training = GaussianTraining(noise, rate, steps)
    seen = training.epsilon_seen(1e-5)
    assert seen == pytest.approx(total.get_epsilon_for_delta(1e-5), rel=2e-3, abs=2e-3)
    assert training.epsilon(1e-5) < seen  # secret batches gain
    assert seen < GaussianTraining(noise, 1.0, steps).epsilon(1e-5)
    average = Account("a", spent=steps * rate / noise**2).epsilon(1e-5)
    assert seen > average  # as often as on average is not the whole truth


def test_known_batches_are_said_beside_secret_ones(tmp_path: Path) -> None:
    (one,) = check(saved(tmp_path, ENGINE | {"batch_size": 10, "records": 100, "epochs": 3}), Told(rounds=2))
    assert one.epsilon is not None
    assert one.details["epsilon_known_batches"] == pytest.approx(GaussianTraining(1.5, 0.1, 60).epsilon_seen(1e-5))
    assert one.epsilon < one.details["epsilon_known_batches"]
    assert "a record is in 6 of them on average" in said(one)
    assert "torch's generator" not in said(one)
    assert "torch's generator" in said(check(saved(tmp_path, ENGINE | {"secure_mode": False}))[0])


@pytest.mark.parametrize(("z", "deviation"), [(1.0, 5.0), (0.3, 0.2), (2.0, 1.01)])
def test_a_noisy_count_takes_its_part_of_the_noise(tmp_path: Path, z: float, deviation: float) -> None:
    """Against dp-accounting, and what Flower itself adds."""
    dp = pytest.importorskip("dp_accounting")
    own = beside_a_count(z, deviation)
    pld = dp.pld.PLDAccountant
    both = pld().compose(dp.GaussianDpEvent(own)).compose(dp.GaussianDpEvent(2 * deviation)).get_epsilon(1e-5)
    assert both == pytest.approx(pld().compose(dp.GaussianDpEvent(z)).get_epsilon(1e-5), rel=1e-3)
    content = {"initial_clipping_norm": 0.1, "noise_multiplier": z, "clipped_count_stddev": deviation}
    (one,) = check(flower(tmp_path, **content, num_sampled_clients=100))
    assert one.sigma == pytest.approx(own * 0.1 / 100)  # it had been z C / K
    assert one.mu == pytest.approx(1 / z)
    zeroed = Account("a", spent=own**-2 + deviation**-2)
    assert f"μ = {zeroed.mu:.3g}" in said(one)
    whole = pld().compose(dp.GaussianDpEvent(own)).compose(dp.GaussianDpEvent(deviation)).get_epsilon(1e-5)
    assert zeroed.epsilon(1e-5) == pytest.approx(whole, rel=1e-3)
    theirs = pytest.importorskip("flwr.supercore.differential_privacy")
    assert theirs.compute_adaptive_noise_params(z, 100, deviation)[1] == pytest.approx(own)
    (adaptive,) = check(saved(tmp_path, ENGINE | {"noise_multiplier": z, "unclipped_num_std": deviation}))
    assert adaptive.details["effective_noise_multiplier"] == pytest.approx(own)


def test_a_count_that_spends_all_is_refused_as_flower_does(tmp_path: Path) -> None:
    content = {"initial_clipping_norm": 0.1, "noise_multiplier": 1.0}
    with pytest.raises(CertificateError, match="the count alone spends more"):
        check(flower(tmp_path, **content, num_sampled_clients=10))  # 10 / 20 on the count
    assert check(flower(tmp_path, **content, num_sampled_clients=100))[0].sigma == pytest.approx(
        (1 - 0.01) ** -0.5 * 0.1 / 100
    )
    assert "give num-sampled-clients" in said(check(flower(tmp_path, **content))[0])


def test_clips_of_layers_add_up_by_their_squares(tmp_path: Path) -> None:
    optimizers = pytest.importorskip("opacus.optimizers")
    clips = [0.3, 0.4, 1.2]
    parameters = [nn.Parameter(torch.zeros(2)) for _ in clips]
    theirs = optimizers.DPPerLayerOptimizer(
        torch.optim.SGD(parameters, lr=0.1), noise_multiplier=1.0, max_grad_norm=clips, expected_batch_size=10
    )
    (one,) = check(saved(tmp_path, ENGINE | {"max_grad_norm": clips, "clipping": "per_layer", "records": 10}))
    assert one.details["clip"] == pytest.approx(1.3) == pytest.approx(theirs.max_grad_norm)
    assert one.sigma == pytest.approx(1.5 * 1.3 / 10)
    assert "3 layers are clipped one by one" in said(one)
    (one,) = check(saved(tmp_path, ENGINE | {"clipping": "per_layer"}))
    assert "√L times as much" in said(one)
    with pytest.raises(CertificateError, match="max-grad-norm = 0: it must be above 0"):
        check(saved(tmp_path, ENGINE | {"max_grad_norm": [1.0, 0.0]}))


def test_tuning_on_the_same_records_is_said_not_to_be_counted(tmp_path: Path) -> None:
    """And what is said of it is right: k tries that are seen are k times the releases."""
    dp = pytest.importorskip("dp_accounting")
    (one,) = check(saved(tmp_path, ENGINE))
    assert "k tries that the server sees cost √k times the μ" in said(one)
    seen = dp.pld.PLDAccountant().compose(dp.GaussianDpEvent(1.5), 9).get_epsilon(1e-5)
    assert one.mu is not None
    assert Account("a", spent=(sqrt(9) * one.mu) ** 2).epsilon(1e-5) == pytest.approx(seen, rel=1e-3)
