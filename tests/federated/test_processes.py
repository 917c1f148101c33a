"""Worker processes: fair shares, files opened rather than copied, and failures that are told."""

import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from federated.helpers_federated import Absent, Unwilling, ragged_clients, tiny_dataset, tiny_model
from gradveil.data import Dataset, Split
from gradveil.errors import GradveilError
from gradveil.federated.processes import _deal, _opened, _portable
from gradveil.federated.simulate import Training, simulate


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20), hands=st.integers(1, 5))
def test_jobs_are_dealt_once_each_and_evenly(sizes: list[int], hands: int) -> None:
    dealt = _deal(sizes, hands)
    assert sorted(i for hand in dealt for i in hand) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in hand) for hand in dealt]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_memory_mapped_file_travels_by_name(tmp_path: Path) -> None:
    content = np.arange(4000, dtype=np.uint8).reshape(10, 1, 20, 20)
    np.save(tmp_path / "images.npy", content)
    split = Split(np.load(tmp_path / "images.npy", mmap_mode="r"), torch.arange(10))
    packed = pickle.dumps(_portable(split))
    assert len(packed) < 2000
    opened = _opened(pickle.loads(packed))
    assert isinstance(opened.images, np.memmap)
    assert (opened.images == content).all()
    part = Split(split.images[3:7], torch.arange(4))  # a slice of a file: its place in the file is not known
    assert (_opened(pickle.loads(pickle.dumps(_portable(part)))).images == content[3:7]).all()


def first_round(model: nn.Module) -> None:
    data: Dataset = tiny_dataset()
    next(simulate(model, data, ragged_clients(), Training(clients=2), engine="processes:workers=2"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [(Unwilling, RuntimeError, "on purpose"), (Absent, GradveilError, "A worker process ended")],
)
def test_a_failing_worker_is_told_and_nothing_hangs(layer: type[nn.Module], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        first_round(nn.Sequential(nn.Flatten(), layer(36, 3)))  # type: ignore[call-arg]


@pytest.mark.slow
def test_a_class_that_workers_cannot_import_is_told() -> None:
    module = ModuleType("only_here")
    module.Local = type("Local", (nn.Linear,), {"__module__": "only_here"})  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "only_here", module)
        with pytest.raises(RuntimeError, match="could not start"):
            first_round(nn.Sequential(nn.Flatten(), module.Local(36, 3)))  # type: ignore[attr-defined]


def test_what_cannot_travel_is_refused() -> None:
    model = tiny_model()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(GradveilError, match="cannot be sent"):
        first_round(model)
