"""The model that a user has: weights of a checkpoint, outputs beyond classes, and commands that run as printed."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gradveil.auditing.run_folder import RunFolder
from gradveil.report.advice import advice, audit_command, train_command
from gradveil.threats.verdict import verdicts

OWN = """
import numpy as np
from torch import nn

def small(input_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(input_shape)), num_classes))

class Several(nn.Module):
    def __init__(self, net, names):
        super().__init__()
        self.net, self.names = net, names

    def forward(self, x):
        y = self.net(x)
        return {name: y for name in self.names} if self.names else (y, None)

def named(input_shape, num_classes):
    return Several(small(input_shape, num_classes), ("logits", "features"))

def paired(input_shape, num_classes):
    return Several(small(input_shape, num_classes), ())

def two_heads(input_shape, num_classes):
    return Several(small(input_shape, num_classes), ("class", "box"))

class Nothing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(__import__("torch").zeros(2))

    def forward(self, x):
        return None

def mask_net(num_classes):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Sigmoid(), nn.Conv2d(4, num_classes, 1))

def make_data():
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = 0.3 * rng.random((90, 1, 6, 6)) + 0.3 * labels[:, None, None, None]
    return images.astype(np.float32), labels

def masks():
    images, _ = make_data()
    return images, (images[:, 0] > 0.4).astype(int) + (images[:, 0] > 0.7)

def far_out():
    images, labels = make_data()
    return 4 * images - 2, labels

def channels_last():
    images, labels = make_data()
    return (255 * images).astype(np.uint8).transpose(0, 2, 3, 1), labels
"""
SMALL = ("--dataset", "my_nets:make_data", "--images", "2", "--clients", "2", "--batch-size", "16", "--no-meter",
         "--defense", "pruning:share=0.5", "--attack", "analytic")  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "my_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)  # another test's
    return command


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("kind", ["safetensors", "plain.pt", "nested.pth"])
def test_a_checkpoint_is_audited_as_it_is(run: Run, tmp_path: Path, kind: str) -> None:
    state, path = network().state_dict(), tmp_path / f"mine.{kind}"
    if kind == "safetensors":
        save_file(state, path)
    elif kind == "plain.pt":
        torch.save(state, path)
    else:
        torch.save({"state_dict": {f"module.{n}": v for n, v in state.items()}, "epoch": 3}, path)
    code, out, err = run("audit", "--model", "my_nets:small", *SMALL, "--weights", path.name, "--out", "run")
    assert code == 0, err
    assert "Images recovered" in out
    rows = RunFolder.open(tmp_path / "run").rows
    assert {row["round"] for row in rows if row["kind"] == "attack"} == {"first"}
    assert not any(row["kind"] == "accuracy" for row in rows)  # no training of our own


def test_rounds_ask_for_training_from_the_checkpoint(run: Run, tmp_path: Path) -> None:
    save_file(network().state_dict(), tmp_path / "mine.safetensors")
    more = ("--weights", "mine.safetensors", "--rounds", "2", "--out", "run")
    code, _, err = run("audit", "--model", "my_nets:small", *SMALL, *more)
    assert code == 0, err
    rows = RunFolder.open(tmp_path / "run").rows
    assert {row["round"] for row in rows if row["kind"] == "attack"} == {"first", "last"}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(36, 5)).state_dict(), "'1.weight' is (5, 36) there and (3, 36)"),
        (nn.Linear(36, 3).state_dict(), "'1.weight' is missing"),
        ({**network().state_dict(), "1.bias": torch.full((3,), torch.nan)}, "'1.bias' holds NaN"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_network_is_one_line(
    run: Run, tmp_path: Path, state: dict[str, torch.Tensor], said: str
) -> None:
    torch.save(state, tmp_path / "other.pt")
    code, _, err = run("audit", "--model", "my_nets:small", *SMALL, "--weights", "other.pt", "--out", "run")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_pickle_that_holds_code_is_not_run(run: Run, tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "whole.pt")  # a module, not its tensors
    code, _, err = run("audit", "--model", "my_nets:small", *SMALL, "--weights", "whole.pt", "--out", "run")
    assert code == 2
    assert "save model.state_dict()" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "dataset"),
    [("named", "make_data"), ("paired", "make_data"), ("small", "channels_last"), ("mask_net", "masks")],
)
def test_outputs_and_inputs_of_other_forms_are_audited(run: Run, tmp_path: Path, model: str, dataset: str) -> None:
    attack = "gs:steps=20" if model == "mask_net" else "analytic"
    code, out, err = run(
        "audit", "--model", f"my_nets:{model}", "--dataset", f"my_nets:{dataset}", "--images", "1", "--clients", "2",
        "--rounds", "1", "--no-meter", "--defense", "pruning:share=0.5", "--attack", attack, "--out", "run",
    )  # fmt: skip
    assert code == 0, err
    rows = RunFolder.open(tmp_path / "run").rows
    assert any(row["kind"] == "attack" for row in rows), out
    assert all(0 <= row["accuracy"] <= 1 for row in rows if row["kind"] == "accuracy")


@pytest.mark.parametrize(
    ("model", "dataset", "said"),
    [
        ("two_heads", "make_data", "returns a dict with 'class': (2, 3), 'box': (2, 3). Return the logits alone"),
        ("Nothing", "make_data", "gives NoneType for 2 inputs"),
        ("mask_net", "make_data", "gives (2, 3, 6, 6) for 2 inputs; it must give one logit for each of the 3 classes"),
        ("small", "far_out", "give floats in [0, 1] or uint8"),
        ("small", "masks", "the loss dense needs (2, 3, 6, 6): a logit for each class at each place"),
    ],
)
def test_what_cannot_be_audited_is_one_line_that_says_what_to_do(run: Run, model: str, dataset: str, said: str) -> None:
    code, _, err = run("audit", "--model", f"my_nets:{model}", "--dataset", f"my_nets:{dataset}", "--out", "run")
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_recommended_commands_run_as_they_are_printed(run: Run, tmp_path: Path) -> None:
    code, _, err = run(
        "audit", "--model", "my_nets:small", *SMALL, "--rounds", "2", "--partition", "iid:devices=3", "--epochs", "2",
        "--examples", "2", "--lr", "0.1", "--out", "run",
    )  # fmt: skip
    assert code == 0, err
    store = RunFolder.open(tmp_path / "run")
    settings, rows = store.settings, store.rows
    found = advice(verdicts(rows), settings, rows)
    assert found is not None
    assert "--clients 2" in found.command
    printed = [audit_command(settings, "pruning:share=0.5"), train_command(settings, "pruning:share=0.5")]
    for number, line in enumerate(printed):
        assert "--partition iid:devices=3 --clients 2 --epochs 2" in line
        code, _, err = run(
            *shlex.split(line)[1:],
            *(() if number else ("--no-meter", "--attack", "analytic")),
            "--out",
            f"again{number}",
        )
        assert code == 0, err


def test_an_audit_that_is_stopped_leaves_its_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gradveil.auditing.audit.film", stop)
    code, _, err = run("audit", "--model", "my_nets:small", *SMALL[:-4], "--rounds", "1", "--out", "run")
    assert code == 130
    assert "Report of what was done: run/report.html" in err
    assert "Images recovered" in (tmp_path / "run" / "report.html").read_text()
