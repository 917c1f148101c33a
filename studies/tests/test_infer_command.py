"""``gradveil infer``: an update file in, classes and vectors out."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from gradveil.auditing.update_files import write_examples, write_update
from gradveil.cli.main import entry
from gradveil.models import build
from gradveil.types import Batch, Update

ARGS = ["--model", "leaknet", "--input-shape", "3x32x32", "--json"]


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """A folder with an update of classes 2 and 7, and its truth."""
    model = build("leaknet", (3, 32, 32), 10)
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([2, 7]).repeat_interleave(8)
    inputs = torch.rand(16, 3, 32, 32, generator=rng) * torch.rand(10, 3, 32, 32, generator=rng)[labels]
    loss = F.cross_entropy(model(inputs), labels)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    write_update(tmp_path / "update.safetensors", Update(dict(zip(names, gradient, strict=True)), 16))
    write_examples(tmp_path / "truth.safetensors", Batch(inputs, labels))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gradveil", "infer", *args])
    with pytest.raises(SystemExit) as stopped:
        entry()
    return int(stopped.value.code or 0)


def test_it_names_the_classes_and_writes_the_vectors(
    client: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = client / "vectors.safetensors", str(client / "update.safetensors")
    assert run(monkeypatch, "--update", file, *ARGS, "--out", str(out)) == 0
    said = json.loads(capsys.readouterr().out)["updates"][0]
    assert said["classes"] == [2, 7]
    assert set(said["confidence"]) == {"2", "7"}
    assert said["layers"] == {"fc3": 84, "fc2": 120, "fc1": 400, "conv2": 150, "conv1": 75}
    assert load_file(out)["fc1"].shape == (1, 10, 400)


def test_with_the_truth_the_controls_stand_beside_the_correlation(
    client: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--update", str(client / "update.safetensors"), "--truth", str(client / "truth.safetensors")]
    assert run(monkeypatch, *args, *ARGS) == 0
    controls = json.loads(capsys.readouterr().out)["updates"][0]["controls"]
    assert controls["true classes"] == [2, 7]
    assert controls["fc3"]["own"] > 0.9
    assert set(controls["fc3"]) == {"own", "wrong", "nearest", "centred"}


def test_several_updates_are_read_in_one_go_and_shown_as_a_table(
    client: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(client / "update.safetensors")
    assert run(monkeypatch, "--update", file, "--update", file, *ARGS[:-1]) == 0
    assert "Classes that each update shows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--update", "nowhere.safetensors", *ARGS], "There is no file"),
        (["--update", "FILE", *ARGS, "--rule", "peak"], "No class rule is called 'peak'"),
        (["--update", "FILE", *ARGS, "--m", "0"], "m=0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    client: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    args = [str(client / "update.safetensors") if a == "FILE" else a for a in args]
    assert run(monkeypatch, *args) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
