"""A user's own data: arrays, functions and directories."""

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.helpers_data import pixels, png, write_parquet
from gradveil.data import Dataset, load
from gradveil.data.base import from_arrays, hold_out
from gradveil.errors import DataError, MissingExtraError


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)


def write_images(root: Path, name: str, images: np.ndarray) -> None:
    (root / name).mkdir(parents=True)
    for i, image in enumerate(images):
        content = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1)
        Image.fromarray(content).save(root / name / f"{i:03}.png")


def test_class_folders_become_classes_in_sorted_order(tmp_path: Path) -> None:
    cats, dogs = pixels(10, 3, 6), pixels(10, 3, 6, seed=1)
    write_images(tmp_path / "pets", "dog", dogs)
    write_images(tmp_path / "pets", "cat", cats)
    found = load(f"folder:path={tmp_path / 'pets'}")
    assert load(str(tmp_path / "pets")).class_names == found.class_names == ("cat", "dog")
    assert found.input_shape == (3, 6, 6)
    assert torch.bincount(found.train.labels).tolist() == [8, 8]
    assert torch.bincount(found.test.labels).tolist() == [2, 2]
    everything = np.concatenate([found.train.images, found.test.images])
    assert {image.tobytes() for image in everything} == {image.tobytes() for image in [*cats, *dogs]}
    for image, label in zip(found.train.images, found.train.labels.tolist(), strict=True):
        assert any((image == other).all() for other in (cats, dogs)[label])


def test_train_and_test_folders_are_kept_apart(tmp_path: Path) -> None:
    train, test = pixels(4, 1, 5), pixels(3, 1, 5, seed=1)
    write_images(tmp_path / "train", "a", train[:2])
    write_images(tmp_path / "train", "b", train[2:])
    write_images(tmp_path / "val", "b", test)
    found = load("folder", tmp_path)
    assert (np.asarray(found.train.images) == train).all()
    assert (np.asarray(found.test.images) == test).all()
    assert found.test.labels.tolist() == [1, 1, 1]


def test_images_of_several_sizes_need_a_size(tmp_path: Path) -> None:
    write_images(tmp_path, "a", pixels(5, 3, 8))
    write_images(tmp_path, "b", pixels(5, 3, 12))
    with pytest.raises(DataError, match=r"size="):
        load("folder", tmp_path)
    found = load("folder:size=6,grey=true", tmp_path)
    assert found.input_shape == (1, 6, 6)


def test_a_folder_of_parquet_is_read_with_its_class_names(tmp_path: Path) -> None:
    images = pixels(20, 3, 8)
    write_parquet(tmp_path / "set/train.parquet", images, [0, 1] * 10, "img", ("left", "right"))
    found = load("folder:path=set", tmp_path)
    assert found.class_names == ("left", "right")
    assert (len(found.train), len(found.test)) == (16, 4)
    write_parquet(tmp_path / "set/validation.parquet", images[:3], [0, 1, 0], "img", ("left", "right"))
    assert (np.asarray(load("folder:path=set", tmp_path).test.images) == images[:3]).all()
    with pytest.raises(DataError, match="has no label column"):
        load("folder:path=set,label=kind", tmp_path)


def test_a_folder_without_images_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        load("folder", tmp_path / "empty")
    with pytest.raises(DataError, match="not a directory"):
        load("folder:path=nowhere")
    with pytest.raises(DataError, match="needs a directory"):
        load("folder")
    write_images(tmp_path / "bad", "a", pixels(3, 1, 4))
    (tmp_path / "bad/a/001.png").write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"001\.png"):
        load("folder", tmp_path / "bad")


def test_arrays_of_every_usual_shape_become_a_data_set() -> None:
    labels = np.arange(20) % 4
    for shape, expected in [
        ((20, 5, 5), (1, 5, 5)),
        ((20, 5, 5, 3), (3, 5, 5)),
        ((20, 2, 5, 5), (2, 5, 5)),
        ((20, 7), (7,)),
    ]:
        data = np.random.default_rng(0).random(shape)
        found = from_arrays("mine", (data, labels))
        assert found.input_shape == expected
        assert found.num_classes == 4
        assert found.train.batch().inputs.dtype == torch.float32
    grey = from_arrays("mine", (pixels(8, 1, 4), torch.arange(8) % 2))
    assert grey.train.batch().inputs.max() <= 1
    last = np.random.default_rng(0).random((20, 5, 5, 3))
    moved = from_arrays("mine", (last, labels), (last, labels))
    assert torch.allclose(moved.train.batch().inputs, torch.from_numpy(last).permute(0, 3, 1, 2).float())


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (np.full((4, 3, 3), 2.0), np.zeros(4, int), r"\[0, 1\]"),
        (np.full((4, 3, 3), np.nan), np.zeros(4, int), r"\[0, 1\]"),
        (np.zeros((4, 3, 3), int), np.zeros(4, int), "uint8"),
        (np.zeros((4,)), np.zeros(4, int), "shape"),
        (np.zeros((4, 3, 3)), np.array(list("abcd")), "whole numbers"),
        (np.zeros((4, 3, 3)), np.full((4, 2), 2), "zeros and ones"),
        (np.zeros((4, 3, 3)), np.full(4, np.nan), "NaN"),
        (np.zeros((4, 3, 3)), np.array([0, 1, -1, 0]), "start at"),
        (np.zeros((4, 3, 3)), np.zeros(3, int), "as many"),
        (np.zeros((0, 3, 3)), np.zeros(0, int), "at least one"),
    ],
)
def test_unfit_arrays_are_refused(inputs: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays("mine", (inputs, labels))


def test_a_function_gives_a_data_set_and_gets_the_folder_where_it_asks(tmp_path: Path) -> None:
    arrays = (np.random.default_rng(0).random((10, 4, 4)), np.arange(10) % 2)
    assert len(load(lambda: arrays).train) == 8
    assert len(load(lambda: (arrays, arrays)).test) == 10
    given: list[Any] = []

    def factory(data: Path | None) -> tuple[Any, Any]:
        given.append(data)
        return arrays

    found = load(factory, tmp_path)
    assert given == [tmp_path]
    assert isinstance(found, Dataset)
    assert load(found) is found
    assert load(lambda: found) is found
    with pytest.raises(DataError, match="returned a int"):
        load(lambda: 3)


def test_an_import_path_gives_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import numpy as np\ndef make():\n    return np.zeros((10, 4, 4)), np.arange(10) % 2\n"
    (tmp_path / "my_own_data.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("my_own_data:make").input_shape == (1, 4, 4)


def test_what_is_held_out_is_a_share_of_each_class_and_disjoint() -> None:
    labels = np.repeat(np.arange(5), [50, 20, 10, 5, 1])
    kept, aside = hold_out(labels, 0.2)
    assert sorted([*kept, *aside]) == list(range(86))
    assert np.bincount(labels[aside], minlength=5).tolist() == [10, 4, 2, 1, 0]
    with pytest.raises(DataError, match="between 0 and 1"):
        hold_out(labels, 1.0)


def test_hugging_face_data_sets_are_taken_as_objects_and_as_saved(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    images = pixels(20, 1, 6)
    kinds = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["cat", "dog"])})
    rows = {"image": [{"bytes": png(image), "path": None} for image in images], "label": [0, 1] * 10}
    whole = hub.Dataset.from_dict(rows, features=kinds)
    found = load(whole)
    assert (found.class_names, len(found.train), len(found.test)) == (("cat", "dog"), 16, 4)
    apart = load(hub.DatasetDict({"train": whole, "test": whole.select(range(3))}))
    assert (np.asarray(apart.train.images) == images).all()
    assert (np.asarray(apart.test.images) == images[:3]).all()
    whole.save_to_disk(tmp_path / "one")
    hub.DatasetDict({"train": whole, "test": whole.select(range(3))}).save_to_disk(tmp_path / "two")
    assert len(load(f"folder:path={tmp_path}/one").train) == 16
    saved = load(f"folder:path={tmp_path}/two")
    assert (np.asarray(saved.test.images) == images[:3]).all()
    assert saved.class_names == ("cat", "dog")


def test_texts_of_the_hub_are_told_to_their_classes(tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    kinds = hub.Features({"text": hub.Value("string"), "label": hub.ClassLabel(names=["good", "bad"])})
    rows = {"text": [f"this film number {i} was seen" for i in range(12)], "label": [0, 1] * 6}
    whole = hub.Dataset.from_dict(rows, features=kinds)
    both = hub.DatasetDict({"train": whole, "test": whole.select(range(4))})
    both.save_to_disk(tmp_path / "films")
    for found in (load(both), load(f"folder:path={tmp_path}/films")):
        assert found.modality.spec_name == "tokens"
        assert (found.class_names, len(found.train), len(found.test)) == (("bad", "good"), 12, 4)
        assert found.train.labels.tolist() == [1, 0] * 6  # good, bad, ...
        assert found.default_model == "bert_tiny"
    with pytest.raises(DataError, match="give a function that returns it as a data frame: --dataset my_module:frame"):
        load(hub.Dataset.from_dict({"age": [1, 2], "outcome": [0, 1]}))


class _Dicom(dict):  # type: ignore[type-arg]
    """As pydicom's own: fields by name."""

    __getattr__ = dict.__getitem__


def test_dicom_files_are_read_where_pydicom_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    stored = {}
    for i in range(8):
        path = tmp_path / "ab"[i % 2] / f"{i}.dcm"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
        white = "MONOCHROME1" if i == 3 else "MONOCHROME2"
        stored[path.name] = _Dicom(
            Rows=5, Columns=6, PhotometricInterpretation=white, pixel_array=rng.integers(0, 4096, (5, 6))
        )
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(MissingExtraError, match=r"gradveil\[dicom\]"):
        load("folder", tmp_path)
    fake, inside = types.ModuleType("pydicom"), types.ModuleType("pydicom.pixels")
    fake.dcmread = lambda path: stored[Path(path).name]  # type: ignore[attr-defined]
    inside.apply_rescale = lambda values, file: values - 1024.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pydicom", fake)
    monkeypatch.setitem(sys.modules, "pydicom.pixels", inside)
    found = load("folder:test_share=0.25", tmp_path)
    everything = np.stack([one.pixel_array for one in stored.values()])
    low, high = int(everything.min()), int(everything.max())
    assert found.levels == (low - 1024, high - 1024)
    assert found.input_shape == (1, 5, 6)
    read = {image.tobytes() for image in [*found.train.images, *found.test.images]}
    for i, one in enumerate(stored.values()):
        values = one.pixel_array
        if i == 3:  # its lowest value is white
            values = values.min() + values.max() - values
        assert np.rint(255 * (values - low) / (high - low)).astype(np.uint8).tobytes() in read
    stored["0.dcm"]["NumberOfFrames"] = 3
    (tmp_path / "a/0.dcm").write_bytes(b"again")
    with pytest.raises(DataError, match=r"0\.dcm cannot be read .*several frames"):
        load("folder", tmp_path)
