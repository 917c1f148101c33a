"""``gradveil plan``: one screen of plain words, the same as JSON, and one line where something is off."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from gradveil.cli.plan import command
from gradveil.errors import GradveilError


def plan(*options: str) -> str:
    """Run the command and return what it prints."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [*options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_promise_becomes_noise_and_an_expected_cost() -> None:
    options = ("--clients", "100", "--rounds", "200", "--tier", "aggregate", "--parameters", "15000")
    text = plan(*options)
    assert "a client takes part at most 20 times" in text
    assert "z = 2.236 a release; each client adds 0.7071 of its clip" in text
    assert "z_run = 0.5, μ = 2, ρ = 2 nats, ε = 10 at δ = 1e-05" in text
    assert "expected to cost more than two points" in text
    assert "--defense veil:promise=reconstruction,tier=aggregate where" in text
    assert "Gaussian-DP for zeroing one record" in text
    assert len(text.splitlines()) < 25
    found: dict[str, Any] = json.loads(plan(*options, "--json"))
    assert found["whole_run"]["guess"] == pytest.approx(0.372, abs=1e-3)
    assert found["noise_to_signal"] == pytest.approx(2.236 * 15_000**0.5 / 2000, rel=1e-3)
    assert found["under_two_points_from_cohort"] == 23


def test_the_floor_and_the_size_come_from_data_and_model() -> None:
    found = json.loads(plan("--dataset", "digits", "--model", "logistic", "--promise", "identification", "--json"))
    assert found["parameters"] > 100
    assert 0.5 < found["whole_run"]["floor"] < 1
    assert "floor        for Gaussian images: error at least" in plan("--dataset", "digits", "--z", "5")
    table = plan("--dataset", "breast_cancer", "--z", "5")
    assert "for Gaussian rows: error at least" in table
    assert "image" not in table
    assert "proved for all images: the line on guessing" in plan("--dataset", "digits")
    assert "The floor is for Gaussian images alone" in plan("--dataset", "digits")
    assert "--defense veil:z=5\n" in plan("--z", "5")
    assert "veil:epsilon=8,delta=1e-05 where" in plan("--epsilon", "8")


def test_a_head_is_rehearsed_on_public_records() -> None:
    options = ("--rehearse", "--dataset", "digits", "--model", "scatter:patches=32,dims=30", "--rounds", "20")
    some = {
        epsilon: json.loads(plan(*options, "--tier", "aggregate", "--epsilon", epsilon, "--json"))["rehearsed"]
        for epsilon in ("8", "0.5")
    }
    assert all(one["low"] <= one["lost"] <= one["high"] for one in some.values())
    assert some["8"]["lost"] < some["0.5"]["lost"]
    text = plan(*options, "--tier", "aggregate", "--epsilon", "8")
    assert f"rehearsed    lr {some['8']['lr']:g} and clip {some['8']['clip']:g}: on drawn records it costs" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rehearse",), "--rehearse needs --model and --dataset"),
        (("--rehearse", "--dataset", "digits", "--model", "lenet"), "one linear layer without bias"),
        (("--z", "0"), "z=0.0: the noise multiplier must be above 0"),
        (("--rounds", "5", "--participations", "6"), "participations=6 exceed rounds=5"),
        (("--cohort", "1", "--tier", "aggregate"), "hides nothing"),
        (("--batch-size", "10", "--tier", "aggregate"), "20 local steps"),
        (("--z", "1", "--rho", "1"), "--rho and --z each say"),
        (("--tier", "central"), "--tier=central: give one of local, aggregate"),
        (("--model", "logistic"), "--model needs --dataset"),
        (("--check", "nowhere.toml"), "nowhere.toml cannot be read"),
        (("--epsilon", "8", "--delta", "1"), "delta=1.0"),
    ],
)
def test_what_cannot_be_is_one_line(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(GradveilError, match=words) as caught:
        plan(*options)
    assert "\n" not in str(caught.value)


def test_a_configuration_is_read_in_one_screen(tmp_path: Path) -> None:
    path = tmp_path / "flower-config.toml"
    path.write_text("clipping-norm = 1\nsensitivity = 1e-4\nepsilon = 10\ndelta = 1e-5\nnum-server-rounds = 3\n")
    text = plan("--check", str(path))
    assert "σ = 4.84e-05" in text
    assert "ρ = 2.13e+08 nats" in text
    assert "it stops no attack that was measured" in text
    assert "1e+04 times too small" in text
    assert len(text.splitlines()) < 20
    (found,) = json.loads(plan("--check", str(path), "--json"))["mechanisms"]
    assert found["rho_round"] == pytest.approx(2.13e8, rel=0.01)
    assert found["releases"] == 3
    path.write_text('{"task_result_filters": [{"filters": [{"name": "PercentilePrivacy"}]}]}')
    other = path.rename(tmp_path / "config_fed_client.json")
    assert "it promises nothing" in plan("--check", str(other))
