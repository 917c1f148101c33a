"""A user's model that fails: one line that says whose error it is and where, exit code 2, nothing written."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

Run = Callable[..., tuple[int, str, str]]

OWN = """
import torch
from torch import nn

class Failing(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        raise KeyError("no such\\nfeature")

def failing():
    return Failing(nn.Flatten(), nn.Linear(64, 10))

def wrong_shape():
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 10))

def raising():
    raise RuntimeError("the disk is on fire")

def asking(depth):
    return nn.Linear(64, depth)

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

def frozen():
    return few().requires_grad_(False)

class Detached(nn.Sequential):
    def forward(self, x):
        return super().forward(x).detach()

def detached():
    return Detached(nn.Flatten(), nn.Linear(64, 10))

class Overwriting(nn.Sequential):
    def forward(self, x):
        y = super().forward(x).sigmoid()
        z = y * y
        y.add_(1)
        return z

def overwriting():
    return Overwriting(nn.Flatten(), nn.Linear(64, 10))
"""

FAULTS = {
    "my_net:failing": "cannot be run on inputs of shape (1, 8, 8). The error is its own: {}/my_net.py:8 in forward: "
    "KeyError: 'no such\\nfeature'",
    "my_net:wrong_shape": "in forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    "my_net:raising": "cannot be made. The error is its own: {}/my_net.py:17 in raising: RuntimeError: the disk is on",
    "my_net:asking": "cannot be made. The error is its own: TypeError: asking() missing 1 required",
    "my_net:few": "gives (2, 3) for 2 inputs; it must give one logit for each of the 10 classes",
    "my_net:frozen": "has no parameter that can be trained",
    "my_net:detached": "depend on no parameter that can be trained",
    "my_net:overwriting": "cannot be differentiated on inputs of shape (1, 8, 8). The error is its own",
    "needy_net:make": "Cannot import 'needy_net'. The error is its own: {}/needy_net.py:1 in <module>: ModuleNotFound",
    "broken_net:make": "Cannot import 'broken_net'. The error is its own: SyntaxError: invalid syntax (broken_net.py,",
    "absent_net:make": "Cannot import 'absent_net' (No module named 'absent_net'). Is it installed",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "my_net.py").write_text(OWN)
    (tmp_path / "needy_net.py").write_text("import no_such_package\n")
    (tmp_path / "broken_net.py").write_text("def make(:\n")
    save_file({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)}, tmp_path / "u.safetensors")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_net", "needy_net", "broken_net"):  # another test's
        monkeypatch.delitem(sys.modules, name, raising=False)
    return command


def check(said: tuple[int, str, str], expected: str, folder: Path) -> None:
    code, out, err = said
    assert code == 2
    assert out == ""
    assert expected.format(folder) in err
    assert len(err.strip().splitlines()) == 1
    assert not (folder / "run").exists()


@pytest.mark.parametrize("model", FAULTS)
def test_a_failing_model_is_one_line(run: Run, tmp_path: Path, model: str) -> None:
    said = run("train", "--dataset", "digits", "--rounds", "1", "--model", model, "--out", "run")
    check(said, FAULTS[model], tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--out", "run"),
        ("audit", "--update", "u.safetensors", "--out", "run"),
        ("infer", "--update", "u.safetensors"),
        ("certify",),
        ("train", "--engine", "flower", "--out", "run"),
    ],
)
def test_every_command_says_so_before_anything_else(run: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for model in ("my_net:failing", "my_net:frozen"):
        check(run(*arguments, "--dataset", "digits", "--model", model), FAULTS[model], tmp_path)
