"""What configurations of Flower, Opacus and NVFlare buy: their own names, the right sums, and what is off."""

import json
import zipfile
from math import inf, log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.certificates.configurations import Bought, Told, check
from gradveil.certificates.privacy import GaussianTraining
from gradveil.errors import CertificateError


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
    torch.save({"privacy_accountant_state_dict": state, "module_state_dict": {}}, tmp_path / "checkpoint.pt")
    assert check(tmp_path / "checkpoint.pt", Told(rounds=2))[0].epsilon == one.epsilon


@pytest.mark.parametrize("kind", ["a tensor", "a ring", "a bomb", "an old format", "no zip"])
def test_a_checkpoint_that_is_made_to_do_harm_is_one_line(tmp_path: Path, kind: str) -> None:
    path, ring = tmp_path / "checkpoint.pt", []
    ring.append(ring)
    held = {"a tensor": torch.ones(3, 3), "a ring": ring}.get(kind, [(1.0, 0.1, 3)])
    torch.save({"history": held}, path, _use_new_zipfile_serialization=kind != "an old format")
    if kind == "a bomb":
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as file, file.open("archive/data/9", "w") as part:
            for _ in range(1100):
                part.write(bytes(2**20))
        assert path.stat().st_size < 2**21
    if kind == "no zip":
        path.write_bytes(b"PK")
    with pytest.raises(CertificateError, match="cannot be read"):
        check(path)


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
    svt, percentile, local, own = check(saved(tmp_path, job), Told(rounds=10, parameters=7_000_000))
    assert svt.epsilon_round == pytest.approx(70_000, rel=1e-3)
    assert svt.epsilon == pytest.approx(700_000, rel=1e-3)
    assert "of choosing the entries alone" in said(svt)
    assert (percentile.mu, percentile.epsilon) == (None, None)
    assert "no promise" in said(percentile)
    assert local.mu == pytest.approx(1 / sqrt(2 * log(1.25 / 1e-5)))
    assert "not known here" in said(own)
    assert "Give --parameters" in said(check(saved(tmp_path, {"a": [job]}))[0])  # however it is nested


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
