"""Data sets from every kind of file, decoded once, and one clear line where there is none."""

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data.helpers_data import pixels, png, write_cifar, write_idx, write_parquet
from gradveil.data import DATASETS, Dataset, Split, load
from gradveil.errors import DataError, SpecError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)  # the hub is out of reach
    return tmp_path / "cache"


def test_digits_need_no_file_and_hold_the_pixels_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    digits = load("digits")
    assert digits.input_shape == (1, 8, 8)
    assert digits.num_classes == 10
    assert len(digits.train) + len(digits.test) == 1797
    everything = torch.cat([digits.train.batch().inputs, digits.test.batch().inputs]).flatten(1)
    original = torch.from_numpy(load_digits().data / 16).float()
    assert torch.equal(everything.sum(0), original.sum(0))
    assert everything.max() == 1
    assert everything.min() == 0
    counts = torch.bincount(digits.test.labels)
    assert counts.min() >= 34  # a fifth of each class, not a slice of sorted data


def test_a_batch_is_a_copy_in_floats() -> None:
    images = pixels(5, 3, 4)
    split = Split(images, torch.arange(5))
    batch = split.batch([3, 1])
    assert torch.allclose(batch.inputs, torch.from_numpy(images[[3, 1]]) / 255)
    assert batch.inputs.dtype == torch.float32
    assert batch.labels.tolist() == [3, 1]
    batch.inputs.zero_()
    assert (split.images == pixels(5, 3, 4)).all()
    assert torch.equal(split.batch(torch.tensor([3, 1])).labels, batch.labels)
    assert torch.equal(split.batch(np.array([3, 1])).labels, batch.labels)
    assert len(split.batch()) == 5
    assert len(split.batch(slice(1, 3))) == 2


@pytest.mark.parametrize(
    "where", ["{s}.parquet", "{s}-00000-of-00001.parquet", "data/{s}-00000-of-00001.parquet", "mnist/{s}.parquet"]
)
def test_parquet_is_read_from_every_usual_place(tmp_path: Path, where: str) -> None:
    train, test = pixels(20, 1, 28), pixels(10, 1, 28, seed=1)
    write_parquet(tmp_path / "mnist" / where.format(s="train"), train, list(range(10)) * 2)
    write_parquet(tmp_path / "mnist" / where.format(s="test"), test, list(range(10)))
    found = load("mnist", tmp_path)
    assert (np.asarray(found.train.images) == train).all()
    assert (np.asarray(found.test.images) == test).all()
    assert found.train.labels.tolist() == list(range(10)) * 2
    assert load("mnist", tmp_path / "mnist").num_classes == 10


def test_several_shards_are_joined_in_order(tmp_path: Path) -> None:
    images = pixels(6, 3, 32)
    for i in range(3):
        write_parquet(tmp_path / f"cifar10/train-0000{i}-of-00003.parquet", images[2 * i : 2 * i + 2], [i, i], "img")
    write_parquet(tmp_path / "cifar10/test.parquet", images[:2], [0, 1], "img")
    found = load("cifar10", tmp_path)
    assert (np.asarray(found.train.images) == images).all()
    assert found.train.labels.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw")])
def test_the_original_idx_files_are_read(tmp_path: Path, name: str, folder: str, zipped: bool) -> None:
    train, test = pixels(12, 1, 28), pixels(10, 1, 28, seed=1)
    write_idx(tmp_path / folder, train, test, zipped)
    found = load(name, tmp_path)
    assert (np.asarray(found.train.images) == train).all()
    assert (np.asarray(found.test.images) == test).all()
    assert found.test.labels.tolist() == list(range(10))


@pytest.mark.parametrize(("kind", "folder"), [("python", "cifar-10-batches-py"), ("binary", "cifar-10-batches-bin")])
def test_the_original_cifar_batches_are_read(tmp_path: Path, kind: str, folder: str) -> None:
    images = pixels(12, 3, 32)
    write_cifar(tmp_path / folder, images, kind)
    for data in (tmp_path, tmp_path / folder):
        found = load("cifar10", data)
        assert (np.asarray(found.train.images) == images[:10]).all()
        assert (np.asarray(found.test.images) == images[10:]).all()
        assert found.train.labels.tolist() == [0, 1] * 5
        assert found.class_names[:2] == ("airplane", "automobile")


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.mkdir, (str(tmp_path / "was_run"),)

    write_cifar(tmp_path / "cifar10", pixels(12, 3, 32), "python")
    (tmp_path / "cifar10/data_batch_3").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(DataError, match="data_batch_3"):
        load("cifar10", tmp_path)
    assert not (tmp_path / "was_run").exists()


def test_a_type_of_parquet_that_holds_a_pickle_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.mkdir, (str(tmp_path / "was_run"),)

    write_parquet(tmp_path / "train.parquet", pixels(4, 1, 8), [0, 1, 0, 1])
    table = pq.read_table(tmp_path / "train.parquet")
    for name in ("arrow.py_extension_type", "pyarrow.py_extension_type"):
        about = {"ARROW:extension:name": name, "ARROW:extension:metadata": pickle.dumps(Evil())}
        marked = [field.with_metadata(about) for field in table.schema]
        pq.write_table(table.cast(pa.schema(marked)), tmp_path / "train.parquet")
        assert len(load(f"folder:path={tmp_path}").train) == 2
        assert not (tmp_path / "was_run").exists()


def test_the_second_load_reads_the_cache_and_a_changed_file_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(10, 1, 28), list(range(10)))
    write_parquet(tmp_path / "mnist/test.parquet", pixels(10, 1, 28), list(range(10)))
    load("mnist", tmp_path)
    calls: list[int] = []
    import gradveil.data.known as known

    real = known.read_parquet
    monkeypatch.setattr(known, "read_parquet", lambda files: calls.append(1) or real(files))
    again = load("mnist", tmp_path)
    assert calls == []
    assert isinstance(again.train.images, np.memmap)
    write_parquet(tmp_path / "mnist/train.parquet", pixels(10, 1, 28, seed=9), list(range(10)))
    changed = load("mnist", tmp_path)
    assert (np.asarray(changed.train.images) == pixels(10, 1, 28, seed=9)).all()
    assert not [path for path in own_cache.iterdir() if path.name.startswith(".")]  # nothing half-written is left


def test_a_broken_cache_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(10, 1, 28), list(range(10)))
    write_parquet(tmp_path / "mnist/test.parquet", pixels(10, 1, 28), list(range(10)))
    load("mnist", tmp_path)
    stored = next(own_cache.glob("mnist-*/train_images.npy"))
    stored.write_bytes(b"")
    assert (np.asarray(load("mnist", tmp_path).train.images) == pixels(10, 1, 28)).all()


def test_without_files_or_hub_one_line_names_both_ways(tmp_path: Path) -> None:
    for data in (None, tmp_path):
        with pytest.raises(DataError) as caught:
            load("svhn", data)
        text = str(caught.value)
        assert "\n" not in text
        assert "GRADVEIL_DATA" in text
        assert "gradveil[hub]" in text


def test_the_hub_is_used_where_no_file_is_and_its_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = ModuleType("datasets")

    def offline(*_: object) -> None:
        raise ConnectionError("no route\nto host")

    hub.load_dataset = offline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(DataError, match="no route") as caught:
        load("mnist")
    assert "\n" not in str(caught.value)

    import pyarrow as pa

    class Part:
        def __init__(self, n: int) -> None:
            self.n = n

        def with_format(self, kind: str) -> "Part":
            assert kind == "arrow"
            return self

        def __getitem__(self, key: slice) -> pa.Table:
            rows = [{"bytes": png(image), "path": None} for image in pixels(self.n, 1, 28)]
            return pa.table({"image": rows, "label": [i % 10 for i in range(self.n)]})

    asked: list[tuple[object, ...]] = []
    hub.load_dataset = lambda *names: asked.append(names) or {"train": Part(20), "test": Part(10)}  # type: ignore[attr-defined]
    assert (np.asarray(load("mnist").train.images) == pixels(20, 1, 28)).all()
    assert asked == [("ylecun/mnist", "mnist")]
    hub.load_dataset = offline  # type: ignore[attr-defined]
    assert len(load("mnist").test) == 10  # from the cache, no network


def test_labels_out_of_range_and_empty_splits_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, 1, 28), [0, 1, 10])
    write_parquet(tmp_path / "mnist/test.parquet", pixels(3, 1, 28), [0, 1, 2])
    with pytest.raises(DataError, match=r"0 to 10.*0\.\.9"):
        load("mnist", tmp_path)
    images = pixels(2, 1, 4)
    with pytest.raises(DataError, match="empty"):
        Dataset("x", Split(images, torch.arange(2)), Split(images[:0], torch.arange(0)), ("a", "b"))
    with pytest.raises(DataError, match="as many"):
        Split(images, torch.arange(3))
    with pytest.raises(DataError, match="shape"):
        Dataset("x", Split(images, torch.arange(2)), Split(pixels(2, 1, 5), torch.arange(2)), ("a", "b"))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mnist/train.parquet", pixels(3, 1, 28), [0, 1, 2])
    (tmp_path / "mnist/test.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"test\.parquet"):
        load("mnist", tmp_path)
    write_idx(tmp_path / "other/fashion_mnist", pixels(12, 1, 28), pixels(10, 1, 28), False)
    idx = tmp_path / "other/fashion_mnist/t10k-images-idx3-ubyte"
    idx.write_bytes(idx.read_bytes()[:-5])
    with pytest.raises(DataError, match="t10k-images"):
        load("fashion_mnist", tmp_path / "other")


def test_unknown_names_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Did you mean 'mnist'"):
        load("mnst")
    with pytest.raises(DataError, match="does not exist"):
        load("mnist", tmp_path / "nowhere")
    assert set(DATASETS.names()) >= {"digits", "mnist", "cifar10", "fashion_mnist", "svhn", "folder"}
