"""Run folders that an earlier version wrote (tests/goldens/folders) are reported; its trainings go on."""

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradveil.auditing.run_folder import RunFolder
from gradveil.federated.server import Checkpoint

OLD = Path(__file__).parents[1] / "goldens" / "folders"
TRAIN = (
    "train", "--model", "logistic", "--partition", "iid:devices=4,per_device=40", "--clients", "2", "--rounds", "5",
    "--save-every", "2", "--aggregator", "fedavgm", "--lr", "0.5", "--engine", "sequential",
)  # fmt: skip
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def old(command: Command, tmp_path: Path) -> Path:
    """A copy of the old folders, where the command runs."""
    shutil.copytree(OLD, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("name", ["audit-done", "audit-cut"])
def test_an_old_audit_is_reported(command: Command, old: Path, name: str) -> None:
    code, _, err = command("report", name)
    assert code == 0, err
    assert "What these updates give away" in (old / name / "report.html").read_text()


def test_a_folder_that_is_being_written_is_not_reported(command: Command, old: Path) -> None:
    with RunFolder(old / "audit-done").hold():
        code, _, err = command("report", "audit-done")
    assert code == 2
    assert f"Another process (pid {os.getpid()} on" in err
    assert not (old / "audit-done" / "report.html").exists()


def test_an_old_training_run_that_was_killed_goes_on(command: Command, old: Path) -> None:
    code, _, err = command(*TRAIN, "--out", "train-cut", "--resume", "--json")
    assert code == 0, err
    cut, done = (RunFolder(old / name).rounds for name in ("train-cut", "train-done"))
    assert [(row["round"], row["clients"]) for row in cut] == [(row["round"], row["clients"]) for row in done]
    assert cut[:2] == [json.loads(line) for line in (OLD / "train-cut" / "rounds.jsonl").read_text().splitlines()[:2]]
    ours, theirs = (Checkpoint.read(old / name / "model.safetensors").state for name in ("train-cut", "train-done"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)  # another machine rounds otherwise
    assert {p.name for p in (old / "train-cut").iterdir()} == {
        "config.toml", "versions.toml", "rounds.jsonl", "checkpoint.safetensors", "model.safetensors",
    }  # fmt: skip
    assert tomllib.loads((old / "train-cut" / "config.toml").read_text())["aggregator"] == "fedavgm"


def test_an_old_training_run_takes_more_rounds_and_no_other_settings(command: Command, old: Path) -> None:
    code, out, err = command(*TRAIN, "--rounds", "6", "--out", "train-done", "--resume", "--json")
    assert code == 0, err
    assert json.loads(out)["rounds"] == 6
    code, _, err = command(*TRAIN, "--clients", "3", "--out", "train-done", "--resume")
    assert code == 2
    assert "clients was 2, now 3" in err
