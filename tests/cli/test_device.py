"""``--device``: the same words in every command that computes, one line where the device is not there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradveil.auditing.run_folder import RunFolder
from gradveil.threats.setup import find_device

Command = Callable[..., tuple[int, str, str]]
INPUTS = Path(__file__).parents[1] / "goldens" / "inputs"
SAVED = ("--update", "update.safetensors", "--model", "lenet:strides=2/1", "--dataset", "digits")
AUDIT = (
    "audit", "--rounds", "2", "--images", "2", "--clients", "2", "--partition", "iid:devices=10,per_device=20",
    "--defense", "representation:share=0.4", "--attack", "newton",
)  # fmt: skip
COMMANDS = {
    "audit": AUDIT,
    "audit of an update": ("audit", *SAVED, "--truth", "truth.safetensors", "--attack", "newton"),
    "infer": ("infer", *SAVED, "--truth", "truth.safetensors"),
    "certify": ("certify", "--images", "1", "--kind", "local", "--defense", "representation:share=0.4"),
    "train": ("train", "--rounds", "1"),
    "reproduce": ("reproduce",),
}
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def saved(command: Command, tmp_path: Path) -> Path:
    """The folder where the command runs, with a saved update in it."""
    shutil.copytree(INPUTS, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("device", ["cuda:99", "tpu"])
def test_a_device_that_is_not_there_is_one_line(command: Command, saved: Path, name: str, device: str) -> None:
    before = sorted(saved.iterdir())
    code, out, err = command(*COMMANDS[name], "--device", device)
    assert code == 2
    assert out == ""
    assert err.startswith(f"gradveil: --device {device}: ")
    assert err.count("\n") == 1
    assert sorted(saved.iterdir()) == before  # nothing was begun


def test_auto_is_the_cpu_where_there_is_nothing_else(
    command: Command, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    said = [command(*COMMANDS["infer"], "--json", "--device", device) for device in ("auto", "cpu")]
    assert said[0] == said[1]
    assert said[0][0] == 0
    code, _, err = command(*COMMANDS["infer"], "--device", "cuda")
    assert (code, err) == (2, "gradveil: --device cuda: no CUDA device was found. Use --device cpu.\n")


@pytest.mark.parametrize("device", [pytest.param("auto", marks=on_a_gpu), pytest.param("cuda", marks=on_a_gpu)])
@pytest.mark.parametrize("name", ["audit", "audit of an update"])
def test_an_audit_on_a_gpu_finds_what_it_finds_on_the_cpu(
    command: Command, saved: Path, name: str, device: str
) -> None:
    rows = {}
    for place in ("cpu", device):
        code, _, err = command(*COMMANDS[name], "--device", place, "--out", place)
        assert code == 0, err
        rows[place] = RunFolder.open(saved / place).rows
    keys = ("kind", "unit", "defense", "server", "attack", "round", "example")
    here, there = ([tuple(row.get(key) for key in keys) for row in rows[place]] for place in ("cpu", device))
    assert here == there
    for old, new in zip(rows["cpu"], rows[device], strict=True):
        if old["kind"] == "floor" or (old["kind"] == "certificate" and not old["sound"]):
            assert new["mse"] == pytest.approx(old["mse"], rel=0.01), old
        elif old["kind"] == "certificate":  # convolutions in TF32, torch's default there, round more: less is sure
            assert 0.8 * old["mse"] < new["mse"] < 1.01 * old["mse"], old
        elif old["kind"] == "meter":
            assert new["mse"] == pytest.approx(old["mse"], rel=0.05), old
    controls = [row for row in rows[device] if row["kind"] == "attack" and row["defense"] == "none"]
    assert controls
    code, _, err = command(*COMMANDS[name], "--device", "cpu", "--out", device, "--resume")
    assert code == 0, err  # where it is computed may change when a run is continued


@pytest.mark.parametrize("name", [pytest.param(n, marks=on_a_gpu) for n in ("infer", "certify", "train")])
def test_every_command_runs_on_a_gpu(command: Command, saved: Path, name: str) -> None:
    code, out, err = command(*COMMANDS[name], "--device", "cuda", "--json")
    assert code == 0, err
    said = json.loads(out)
    if name in ("infer", "certify"):
        code, plain, err = command(*COMMANDS[name], "--device", "cpu", "--json")
        assert code == 0, err
        expected = json.loads(plain)
        if name == "infer":
            assert said["updates"][0]["classes"] == expected["updates"][0]["classes"]
        else:
            assert said["certificates"][0]["mse"] == pytest.approx(expected["certificates"][0]["mse"], rel=0.01)
