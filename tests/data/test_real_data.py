"""The real files, where a data folder is set."""

from pathlib import Path

import numpy as np
import pytest
import torch

import gradveil
from gradveil.data import load

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))


def test_the_second_load_of_cifar_decodes_nothing(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("cifar10", data_folder)
    monkeypatch.setattr("PIL.Image.open", lambda *_: pytest.fail("an image was decoded once more"))
    second = load("cifar10", data_folder)
    batch = second.train.batch(np.arange(0, 50000, 100))
    assert len(second.train) == 50000
    assert len(second.test) == 10000
    assert second.input_shape == (3, 32, 32)
    assert torch.equal(batch.labels, first.train.labels[::100])
    assert torch.bincount(second.train.labels).tolist() == [5000] * 10


def test_mnist_has_its_known_counts_and_mean(data_folder: Path) -> None:
    mnist = gradveil.dataset("mnist", data_folder)
    assert torch.bincount(mnist.train.labels).tolist()[:3] == [5923, 6742, 5958]
    assert float(np.asarray(mnist.train.images).mean()) / 255 == pytest.approx(0.1307, abs=1e-4)
