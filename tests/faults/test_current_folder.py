"""No command runs what lies in the folder where it is given (the current folder is imported from)."""

import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from conftest import Command

from cli.test_every_command import RUNS, files  # noqa: F401
from faults.conftest import Count

pytestmark = pytest.mark.slow
POISON = "open(__file__[:-2] + 'ran', 'w').close()\nraise SystemExit(99)\n"  # which itself imports nothing
OPTIONAL = (
    "jinja2", "gradio", "opacus", "dp_accounting", "nvflare", "tensorboard", "lightning", "transformers", "cupy",
    "triton", "polars", "pandas", "datasets", "ray", "peft", "sitecustomize", "usercustomize",
)  # fmt: skip
DRAW = """
from pathlib import Path
from gradveil_studies.paper.figures import figure
with figure(Path("drawn"), 2, 1) as empty:
    empty.text(0, 0, "x")
"""
OWN = """
import torch
from torch import nn
import helper

def make(input_shape, num_classes):
    import later
    return helper.Own(nn.Flatten(), nn.Linear(64, num_classes))

def data():
    import numpy as np
    import later
    return np.random.default_rng(0).random((40, 8, 8)), np.arange(40) % 4

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""


def poisoned(folder: Path, standard: bool = True) -> Path:
    """Put a file beside a run for every module that Python could look for."""
    names = {*packages_distributions(), *OPTIONAL, *(sys.stdlib_module_names if standard else ())} - {"gradveil"}
    for name in names:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(POISON)
    (folder / "matplotlibrc").write_text("text.usetex: True\nfont.size: 40\nbackend: module://jinja2\n")
    return folder


def given(folder: Path, *words: str, module: bool = False) -> str:
    """Give a command there, as the installed program does or by ``-m``."""
    program = folder.parent / f"{folder.name}-bin" / "gradveil"
    program.parent.mkdir(exist_ok=True)
    program.write_text("from gradveil.cli.main import entry\nif __name__ == '__main__':\n    entry()\n")
    start = ["-m", "gradveil"] if module else [str(program)]
    done = subprocess.run(
        [sys.executable, *start, *words], cwd=folder, capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not list(folder.glob("*.ran")), words
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


SHORT = ("report", "check-model", "list")


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.long) for n in RUNS])
def test_a_command_imports_nothing_of_the_folder(
    command: Command,
    files: Path,  # noqa: F811
    name: str,
    count: Count,
) -> None:
    for needed in {"report": ["audit"], "dossier": ["audit"]}.get(name, []):
        for words in RUNS[needed]:
            assert command(needed, *words.split())[0] == 0
    poisoned(files)
    for words in RUNS[name][-1:] if name in ("reproduce", "plan", "list") else RUNS[name]:
        given(files, name, *words.split())
        count("commands in a folder of hostile modules")


@pytest.mark.long
def test_a_figure_and_workers_import_nothing_of_the_folder(tmp_path: Path, count: Count) -> None:
    poisoned(tmp_path)
    words = ("--only", "time/*", "--defense", "gaussian:scale=0.001", "--jobs", "2", "--out", "board")
    given(tmp_path, "leaderboard", *words)
    count("commands in a folder of hostile modules")


def test_a_figure_looks_the_same_whatever_lies_in_the_folder(tmp_path: Path) -> None:
    drawn = []
    for folder in (tmp_path / "clean", tmp_path / "poisoned"):
        folder.mkdir()
        if folder.name == "poisoned":
            poisoned(folder)
        subprocess.run([sys.executable, "-P", "-c", DRAW], cwd=folder, check=True, timeout=120)
        drawn.append((folder / "drawn.svg").read_bytes())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("engine", [pytest.param("sequential", marks=pytest.mark.long), "processes:workers=2"])
def test_a_module_of_ones_own_is_found_and_nothing_else(tmp_path: Path, engine: str, count: Count) -> None:
    poisoned(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("from torch import nn\nclass Own(nn.Sequential):\n    pass\n")
    (tmp_path / "later.py").write_text("")
    words = ("--model", "own:make", "--dataset", "own:data", "--loss", "own:loss", "--rounds", "1", "--clients", "2")
    given(tmp_path, "train", *words, "--partition", "iid:devices=4", "--engine", engine, "--out", "run")
    count("commands in a folder of hostile modules")


def test_by_module_as_well(tmp_path: Path, count: Count) -> None:
    """``python -m`` itself looks for what it needs in the current folder; gradveil does not."""
    poisoned(tmp_path, standard=False)
    assert "digits" in given(tmp_path, "list", "dataset", module=True)
    count("commands in a folder of hostile modules")
    given(tmp_path, "plan", module=True)
    count("commands in a folder of hostile modules")


@pytest.mark.long
def test_a_simulation_on_flower_imports_nothing_of_the_folder(tmp_path: Path, count: Count) -> None:
    pytest.importorskip("ray")
    poisoned(tmp_path)
    words = ("--model", "logistic", "--rounds", "1", "--clients", "2", "--partition", "iid:devices=2")
    given(tmp_path, "train", *words, "--engine", "flower", "--out", "run")
    count("commands in a folder of hostile modules")
