"""``--loss`` on a user's own regression and multi-label data: train, audit, certify, saved updates; and bad input."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.auditing.update_files import write_examples, write_update
from gradveil.data import load
from gradveil.federated.client import local_update
from gradveil.models import build

Run = Callable[..., tuple[int, str, str]]

OWN = """
import numpy as np
import torch
from torch import nn

x = np.random.default_rng(0).random((60, 4, 4)).astype(np.float32)

def numbers():
    return x, 10 * x.mean((1, 2))

def pairs():
    return x, np.stack([x[:, 0, 0], x[:, 1, 1]], 1)

def tags():
    return x, x.reshape(60, -1)[:, :3] > 0.5

def yesno():
    return x, (x[:, 0, 0] > 0.5).astype(int)

def mlp(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Sigmoid(), nn.Linear(12, num_classes))

def one():
    return mlp(1)

def flat():
    return nn.Sequential(mlp(1), nn.Flatten(0))

def cauchy(output, target):
    return (output.reshape(target.shape) - target).square().log1p().mean()

def one_logit(output, target):
    return nn.functional.binary_cross_entropy_with_logits(output[:, 0], target.float())

def rows(output, target):
    return output.square()

def nothing(output, target):
    return None

def nan(output, target):
    return output.sum() * float("nan")

def failing(output, target):
    raise KeyError("no such target")

number = 3
"""
MLP = ("--model", "own_task:mlp")
ROUND = ("--partition", "iid:devices=3", "--clients", "2", "--rounds", "1")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "own_task.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    return command


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


@pytest.mark.parametrize(
    ("dataset", "loss", "model", "scored_by"),
    [
        ("numbers", "mse", "mlp", "R²"),
        ("numbers", "mse", "flat", "R²"),
        ("pairs", "own_task:cauchy", "mlp", "R²"),
        ("tags", "bce", "mlp", "accuracy"),
        ("yesno", "bce", "flat", "accuracy"),
        ("yesno", "own_task:one_logit", "one", "accuracy"),
        ("yesno", "cross_entropy:smoothing=0.1,weights=1/3", "mlp", "accuracy"),
    ],
)
def test_a_run_is_trained_and_audited(
    run: Run, tmp_path: Path, dataset: str, loss: str, model: str, scored_by: str
) -> None:
    task = ("--dataset", f"own_task:{dataset}", "--loss", loss, "--model", f"own_task:{model}", *ROUND)
    code, out, _ = run("train", *task, "--lr", "0.1", "--json", "--out", "trained")
    told = json.loads(out)
    assert (code, told["scored_by"]) == (0, scored_by)
    assert 0 <= told["accuracy"] <= 1 or scored_by == "R²"
    attack = "dlg:steps=5,restarts=2" if "one_logit" in loss else "newton"
    chosen = ("--images", "2", "--defense", "representation:share=0.4", "--attack", attack)
    code, out, err = run("audit", *task, *chosen, "--json", "--out", "audited")
    assert code == 0, err
    told = json.loads(out)
    assert [v["scored_by"] for v in told["verdicts"]] == [scored_by] * 2
    assert told["verdicts"][0]["outcome"] == "recovered"
    assert told["not_run"] == []
    control = [row for row in rows(tmp_path / "audited", "attack") if row["defense"] == "none"]
    assert all(row["label"] in (1.0, None) for row in control)
    assert any(row["label"] == 1.0 for row in control) or "cauchy" in loss
    assert rows(tmp_path / "audited", "meter")[0]["says"].startswith("Says nothing: no noise")
    page = (tmp_path / "audited" / "report.html").read_text()
    assert f"Privacy against {scored_by}" in page


def test_the_words_of_a_regression(run: Run) -> None:
    task = ("--dataset", "own_task:numbers", "--loss", "mse", *MLP, *ROUND)
    _, out, _ = run("train", *task, "--out", "trained")
    assert out.startswith("R² ")
    _, out, _ = run("audit", *task, "--images", "1", "--defense", "none", "--attack", "analytic", "--no-meter")
    assert "accuracy" not in out.lower()
    assert "R² " in out


@pytest.mark.parametrize(("dataset", "loss"), [("numbers", "mse"), ("tags", "bce")])
def test_a_saved_update_carries_its_loss(run: Run, tmp_path: Path, dataset: str, loss: str) -> None:
    data = load(f"own_task:{dataset}")
    model = build("own_task:mlp", data.input_shape, data.outputs(loss))
    truth = data.train.batch([3])
    update = local_update(model, truth, "none", 0.1, torch.Generator().manual_seed(0), loss=loss)
    write_update("update.safetensors", update, loss)
    write_examples("truth.safetensors", truth)
    files = ("--update", "update.safetensors", "--attack", "newton")
    code, out, err = run("audit", *files, "--truth", "truth.safetensors", *MLP, "--json", "--out", "run")
    assert code == 0, err
    assert json.loads(out)["lines"][0]["grade"] == "recovered"
    assert rows(tmp_path / "run", "attack")[0]["label"] == 1.0
    code, _, err = run("infer", "--update", "update.safetensors", *MLP, "--truth", "truth.safetensors")
    assert (code, err) == (2, f"gradveil: The loss {loss} is not one of classes, so there are none to infer.\n")


def test_code_that_a_file_names_is_not_run(run: Run) -> None:
    data = load("own_task:pairs")
    model, truth = build("own_task:mlp", data.input_shape, 2), data.train.batch([3])
    write_examples("truth.safetensors", truth)
    update = local_update(model, truth, "none", 0.1, torch.Generator(), loss="own_task:cauchy")
    write_update("update.safetensors", update, "own_task:cauchy")
    files = ("audit", "--update", "update.safetensors", "--truth", "truth.safetensors", *MLP, "--attack", "newton")
    code, _, err = run(*files)
    assert (code, "Code that a file names is not run: give --loss own_task:cauchy" in err) == (2, True)
    code, out, _ = run(*files, "--loss", "own_task:cauchy", "--json")
    assert (code, json.loads(out)["lines"][0]["grade"]) == (0, "recovered")


def test_certify_meters_the_loss(run: Run) -> None:
    code, out, err = run(
        "certify", "--dataset", "own_task:numbers", "--loss", "mse", *MLP, "--images", "1", "--kind", "local", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["meter"][0][0]["rank"] == 16


BAD = {
    (
        "numbers",
        "cross_entropy:smoothing=0.1",
    ): "cross_entropy takes classes, whole numbers (N,); the targets are numbers from",
    ("tags", "cross_entropy"): "Use the loss bce for several yes-or-no labels",
    ("yesno", "hinge"): "No loss is called 'hinge'. Known: bce, cross_entropy, dense, mse, next_token.",
    ("numbers", "bce"): "bce takes targets of 0 and 1; the targets are numbers from",
    ("yesno", "cross_entropy:weights=1/2/3"): "The loss has 3 weights and the model gives 2 classes.",
    ("yesno", "cross_entropy:smoothing=2"): "smoothing=2: give a number from 0 to below 1",
    ("yesno", "own_task:rows"): "returned a tensor of shape (2, 2); it must return the mean, one number",
    ("yesno", "own_task:nothing"): "returned a NoneType; it must return the mean, one number",
    ("yesno", "own_task:nan"): "The loss own_task:nan of the first examples is nan. A finite number is needed.",
    ("yesno", "own_task:failing"): "in failing: KeyError: 'no such target'",
    ("yesno", "own_task:absent"): "Module 'own_task' has no 'absent'. Give module:function.",
    ("yesno", "own_task:number"): "own_task:number is a int; give a function loss(output, target).",
    ("pairs", "mse --model own_task:one"): "The model gives (2, 1) for targets (2, 2); the loss mse needs one output",
    ("tags", "bce --model own_task:flat"): "The model gives (2,) for targets (2, 3); the loss bce needs one output",
    ("numbers", "mse --partition shards:devices=2"): "A partition by class needs labels (N,) of whole numbers",
}


@pytest.mark.parametrize("case", BAD, ids=" ".join)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, case: tuple[str, str]) -> None:
    dataset, loss = case
    for name in ("train", "audit"):
        code, out, err = run(
            name, *ROUND, *MLP, "--dataset", f"own_task:{dataset}", "--out", "run", "--loss", *loss.split()
        )  # fmt: skip
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1), err
        assert BAD[case] in err
        assert not (tmp_path / "run").exists()
