"""Small things every test may use: a tiny model, a tiny batch, a generator."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Generator, nn

from gradveil.cli.main import entry
from gradveil.types import Batch

Command = Callable[..., tuple[int, str, str]]
settings.register_profile("gradveil", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("gradveil")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow ones: a long test at the end would leave the other cores with nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def same_randomness() -> None:
    """Whatever ran before: what is drawn without a generator of its own is drawn from the same state."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def rng() -> Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def model() -> nn.Module:
    """Two sigmoid convolutions and a linear layer on 8x8 grey images; the layer to defend is '5'."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.Sigmoid(), nn.Conv2d(4, 4, 3, padding=1), nn.Sigmoid(),
            nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip


@pytest.fixture
def batch(rng: Generator) -> Batch:
    return Batch(torch.rand(3, 1, 8, 8, generator=rng), torch.tensor([0, 3, 1]))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """``gradveil`` in an empty folder, by its arguments: the exit code, what it printed, what it said of errors."""
    monkeypatch.chdir(tmp_path)

    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gradveil", *arguments])
        code = 0
        try:
            entry()
        except SystemExit as done:
            code = int(done.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return go


@pytest.fixture
def data_folder() -> Path:
    """The folder with MNIST and CIFAR-10; the test is skipped where there is none."""
    folder = os.environ.get("GRADVEIL_DATA")
    if not folder or not (Path(folder) / "mnist").is_dir():
        pytest.skip("GRADVEIL_DATA does not name a folder with MNIST and CIFAR-10")
    return Path(folder)
