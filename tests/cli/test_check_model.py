"""``gradveil check-model``: exit code 0 for honest weights, 3 for planted ones, 2 where it cannot tell."""

import json
from pathlib import Path

import pytest
import torch
from conftest import Command
from safetensors.torch import save_file

from gradveil.attacks.base import Malicious, build
from gradveil.auditing.update_files import write_examples
from gradveil.data import load
from gradveil.models import build as build_model

SPEC, SHAPE = "lenet:strides=2/1", (1, 8, 8)
MODEL = ("--model", SPEC, "--input-shape", "1x8x8")


@pytest.fixture
def files(command: Command, tmp_path: Path) -> Path:
    """The honest weights, those of a fishing server, and a client's examples."""
    digits, honest, attack = load("digits"), build_model(SPEC, SHAPE, 10), build("fishing")
    assert isinstance(attack, Malicious)
    public = digits.test.sample(100, torch.Generator().manual_seed(0))
    planted = attack.plant(honest, SHAPE, 10, public, torch.Generator().manual_seed(0))
    save_file(honest.state_dict(), tmp_path / "honest.safetensors")
    save_file(planted.state_dict(), tmp_path / "planted.safetensors")
    write_examples(tmp_path / "own.safetensors", digits.train.batch(range(8)))
    return tmp_path


def test_honest_weights_pass(command: Command, files: Path) -> None:
    code, out, _ = command("check-model", "honest.safetensors", *MODEL, "--examples", "own.safetensors")
    assert code == 0
    assert "Nothing suspicious. The weights were held against themselves, the model" in out


def test_planted_weights_are_told_in_sentences(command: Command, files: Path) -> None:
    code, out, _ = command("check-model", "honest.safetensors", "--after", "planted.safetensors", *MODEL)
    assert code == 3
    assert "last layer: Row" in out
    assert "jump: Of the weights before" in out
    assert "Suspicious: 3 findings." in out


def test_programs_get_json(command: Command, files: Path) -> None:
    code, out, _ = command("check-model", "planted.safetensors", "--json")
    assert code == 3
    said = json.loads(out)
    assert {finding["kind"] for finding in said["findings"]} == {"last layer"}
    assert said["compared"] == ["themselves"]
    assert said["suspicious"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.safetensors"], "There is no file"),
        (["honest.safetensors", "--examples", "own.safetensors"], "their model is needed"),
        (["honest.safetensors", "--model", SPEC], "input shape"),
    ],
)
def test_what_cannot_be_checked_is_an_error(command: Command, files: Path, arguments: list[str], words: str) -> None:
    code, _, err = command("check-model", *arguments)
    assert code == 2
    assert words in err
