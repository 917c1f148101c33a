"""Bad input: one clear line, exit code 2, nothing half-written."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradveil.models import build

Run = Callable[..., tuple[int, str, str]]

OWN = """
import numpy as np
import torch
from torch import nn

def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

def small_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))

def wrong_shape():
    return nn.Sequential(nn.Flatten(), nn.Linear(15, 3))

def fails():
    raise RuntimeError("the disk is on fire")

def images(n):
    return np.random.default_rng(0).random((n, 1, 4, 4), dtype=np.float32)

def make_data():
    return images(60), np.arange(60) % 3

def empty():
    return images(0), np.arange(0)

def negative():
    return images(9), np.arange(9) - 1

def out_of_range():
    from gradveil.data.base import Dataset, Split
    split = Split(images(9), torch.arange(9), 1.0)
    return Dataset("mine", split, split, ("a", "b"))
"""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, command: Run, tmp_path: Path) -> Run:
    (tmp_path / "my_module.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_module", raising=False)  # another test's
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    return command


def one_line(err: str) -> str:
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


QUICK = ("--model", "my_module:make_model", "--dataset", "my_module:make_data", "--rounds", "1", "--images", "1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*QUICK, "--defense", "prunning"), "No defense is called 'prunning'. Did you mean 'pruning'?"),
        ((*QUICK, "--defense", "pruning:shar=0.1"), "no setting 'shar'. Did you mean 'share'?"),
        ((*QUICK, "--defense", "pruning:share=2"), "from 0 to 1"),
        ((*QUICK, "--defense", "representation:layer=fc7"), "no linear or convolutional layer 'fc7'"),
        ((*QUICK, "--attack", "nweton"), "No attack is called 'nweton'. Did you mean 'newton'?"),
        ((*QUICK, "--model", "lennet"), "No model is called 'lennet'"),
        ((*QUICK, "--model", "my_module:nothing"), "has no 'nothing'"),
        ((*QUICK, "--model", "no_such_module:make"), "Cannot import 'no_such_module'"),
        ((*QUICK, "--model", "my_module:wrong_shape"), "cannot be run on inputs of shape (1, 4, 4)"),
        ((*QUICK, "--model", "my_module:small_model"), "one logit for each of the 3 classes"),
        ((*QUICK, "--model", "my_module:fails"), "the disk is on fire"),
        ((*QUICK, "--dataset", "my_module:fails"), "the disk is on fire"),
        ((*QUICK, "--dataset", "digit"), "No dataset is called 'digit'. Did you mean 'digits'?"),
        ((*QUICK, "--dataset", "my_module:empty"), "at least one"),
        ((*QUICK, "--dataset", "my_module:negative"), "must start at 0"),
        ((*QUICK, "--dataset", "my_module:out_of_range"), "must lie in 0..1"),
        ((*QUICK, "--data", "nowhere"), "'nowhere' does not exist"),
        ((*QUICK, "--partition", "iid:devices=1000"), "asks for 1000 examples"),
        ((*QUICK, "--clients", "11"), "11 clients a round"),
        ((*QUICK, "--rounds", "0"), "rounds=0: give a whole number from 1"),
        ((*QUICK, "--images", "1000"), "1000 images were asked for"),
        ((*QUICK, "--lr", "-1"), "lr=-1.0"),
        ((*QUICK, "--images", "3", "--examples", "2"), "cannot be dealt out"),
        ((*QUICK, "--config", "nowhere.toml"), "There is no file nowhere.toml"),
        ((*QUICK, "--truth", "t.safetensors"), "--truth belongs to --update"),
        (("--update", "u.safetensors", "--rounds", "2"), "--rounds belongs to"),
        (("--update", "u.safetensors"), "There is no file u.safetensors"),
        (("--update", "my_module.py"), "The shape of the inputs is not known"),
        (("--update", "u.safetensors", "--input-shape", "1by8"), "'1by8' cannot be read"),
        (("--update", "my_module.py", "--input-shape", "1x8x8"), "not a safetensors file"),
        (("--update", "u", "--defense", "none", "--defense", "pruning"), "Give one --defense"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = run("audit", *arguments, "--out", "run")
    assert code == 2
    assert said in one_line(err)
    assert out == ""
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("fault", "said"),
    [("nan", "NaN or infinite"), ("shape", "in the model"), ("name", "that the model has not"), ("dtype", "dtype")],
)
def test_a_bad_update_is_one_clear_line(run: Run, tmp_path: Path, fault: str, said: str) -> None:
    model = build("logistic", (1, 8, 8), 10)
    g = {name: torch.zeros_like(p.detach()) for name, p in model.named_parameters()}
    first = next(iter(g))
    if fault == "nan":
        g[first].view(-1)[0] = torch.nan
    elif fault == "shape":
        g[first] = torch.zeros(3)
    elif fault == "dtype":
        g[first] = g[first].int()
    else:
        g["other"] = torch.zeros(1)
    save_file(g, tmp_path / "u.safetensors")
    arguments = ("--update", "u.safetensors", "--model", "logistic", "--dataset", "digits", "--out", "run")
    code, _, err = run("audit", *arguments)
    assert code == 2
    assert said in one_line(err)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_clear_line_and_the_run_can_go_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [4]

    def fills_up(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr("gradveil.files.os.fsync", fills_up)
    code, _, err = run("audit", *QUICK, "--defense", "none", "--attack", "newton", "--out", "run", "--json")
    assert code == 2
    assert "No space left" in one_line(err)
    assert "--resume" in err
    assert not [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".tmp")]


def test_a_run_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text('dataset = "digits"\n')
    code, _, err = run("audit", *QUICK, "--out", "run")
    assert code == 2
    assert "already holds a run" in one_line(err)


def test_a_folder_that_is_no_run_has_no_report(run: Run, tmp_path: Path) -> None:
    code, _, err = run("report", str(tmp_path))
    assert code == 2
    assert "not a run folder" in one_line(err)


def test_help_names_the_options(run: Run) -> None:
    code, out, _ = run("audit", "--help-all")
    assert code == 0
    for option in ("--defense", "--attack", "--model", "--dataset", "--data", "--seed", "--out", "--json", "--resume"):
        assert option in out
