"""The same seed gives the same rows: byte for byte, in processes of their own, at a given number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
import numpy as np
from torch import nn

def make_model(input_shape, num_classes):
    first, second, last = nn.Linear(36, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, num_classes)
    return nn.Sequential(nn.Flatten(), first, nn.Sigmoid(), second, nn.Sigmoid(), last)

def make_data():
    labels = np.arange(90) % 3
    images = 0.3 * np.random.default_rng(0).random((90, 1, 6, 6)) + 0.3 * labels[:, None, None, None]
    return images.astype(np.float32), labels
"""
SMALL = (
    "--model", "own:make_model", "--dataset", "own:make_data", "--rounds", "1", "--images", "1", "--clients", "2",
    "--batch-size", "16", "--defense", "pruning:share=0.5", "--attack", "analytic", "--tier", "oblivious",
    "--meter-seconds", "3600",
)  # fmt: skip


def rows(folder: Path, width: int, threads: int, order: int) -> bytes:
    """Run an audit whose sets have an order of their own; return what it wrote."""
    (folder / "own.py").write_text(OWN.replace("WIDTH", str(width)))
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONHASHSEED": str(order), "PADDING": "x" * 40 * order}
    command = [sys.executable, "-m", "gradveil", "audit", *SMALL, "--out", f"run{order}"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return (folder / f"run{order}" / "rows.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "threads"), [(40, 1), pytest.param(320, 2, marks=pytest.mark.long)]
)  # the wide one is not cut down to one thread
def test_two_audits_of_one_seed_write_the_same_bytes(tmp_path: Path, width: int, threads: int) -> None:
    first, second = (rows(tmp_path, width, threads, order) for order in (1, 2))
    assert b'"kind": "meter"' in first
    assert first == second
