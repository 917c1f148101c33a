"""A small file takes little time and memory, whatever it declares; a large one takes time that grows with its size."""

import io
import json
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.helpers_data import pixels, png
from faults.conftest import Count
from faults.plays import SMALL
from faults.stage import Act, Stage, one_line
from faults.test_hostile import idle, refused  # noqa: F401
from gradveil.auditing.run_folder import read_arrays
from gradveil.data import load
from gradveil.data.base import by_label
from gradveil.errors import GradveilError

pytestmark = pytest.mark.slow
TRAIN = ("train", "--rounds", "1", "--out", "run", "--dataset")


def wide(folder: Path) -> None:
    (folder / "wide.csv").write_text(",".join(f"c{i}" for i in range(100_000)) + ",y\n" + "1," * 100_000 + "1\n")


def parquet_bomb(folder: Path) -> None:
    """A few kilobytes: one value of a megabyte, ten thousand times."""
    value = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10_000, np.int32)), pa.array([b"\0" * 2**20]))
    table = pa.table({"image": value, "label": pa.array(np.arange(10_000) % 2)})
    pq.write_table(table, folder / "train.parquet", store_schema=False, compression="zstd")
    assert (folder / "train.parquet").stat().st_size < 10_000


def texts_bomb(folder: Path) -> None:
    value = pa.DictionaryArray.from_arrays(pa.array(np.zeros(10**6, np.int32)), pa.array(["a" * 2**16]))
    table = pa.table({"name": value, "y": pa.array(np.arange(10**6) % 2)})
    pq.write_table(table, folder / "bomb.parquet", store_schema=False, compression="zstd")
    assert (folder / "bomb.parquet").stat().st_size < 300_000


def numbered_texts(folder: Path) -> None:
    """60 kilobytes: one text of a megabyte, to which 20,000 rows point, also where it was read."""
    value = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["a " * 2**19]))
    table = pa.table({"text": value, "label": pa.array(np.arange(20_000) % 2), "age": np.arange(20_000)})
    pq.write_table(table, folder / "train.parquet", compression="zstd")
    assert (folder / "train.parquet").stat().st_size < 100_000


def arrow(folder: Path, table: Any, packed: str | None = None) -> None:
    """What save_to_disk() of Hugging Face datasets writes."""
    (folder / "train").mkdir()
    options = pa.ipc.IpcWriteOptions(compression=packed)
    with pa.ipc.new_stream(folder / "train" / "data-00000-of-00001.arrow", table.schema, options=options) as file:
        file.write_table(table)


def long_texts(folder: Path) -> None:
    """240 MB of words in 100 kilobytes."""
    table = pa.table({"text": ["a b c " * 10**5] * 400, "label": [0, 1] * 200})
    pq.write_table(table, folder / "train.parquet", compression="zstd", use_dictionary=False)


def packed_texts(folder: Path) -> None:
    arrow(folder, pa.table({"text": ["a" * 2**20] * 1500, "label": [0, 1] * 750}), "zstd")


def rows_of_nothing(folder: Path) -> None:
    arrow(folder, pa.table({"text": pa.nulls(10**9), "label": pa.nulls(10**9)}))


def texts_elsewhere(folder: Path) -> None:
    """The text of a row begins a gigabyte behind the file."""
    places = pa.array([0, 5, 2**30, 11], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 3, [None, places, pa.py_buffer(b"hello world")])
    arrow(folder, pa.table({"text": texts, "label": [0, 1, 0]}))


def rows_bomb(folder: Path) -> None:
    """300 million zeros, run-length coded."""
    with pq.ParquetWriter(folder / "rows.parquet", pa.schema([("x", pa.int64()), ("y", pa.int64())])) as writer:
        part = pa.table({"x": np.zeros(10**6, np.int64), "y": np.zeros(10**6, np.int64)})
        for _ in range(110):
            writer.write_table(part)


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


HOSTILE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a table of 100,001 columns": ("table:path=wide.csv,target=y", wide),
    "10 GB of images in a few kilobytes": ("folder:path=.", parquet_bomb),
    "64 GB of texts in a few kilobytes": ("table:path=bomb.parquet,target=y", texts_bomb),
    "20 GB of texts under a number": ("folder:path=.", numbered_texts),
    "the same in a table": ("table:path=train.parquet,target=label", numbered_texts),
    "240 MB of words in a few kilobytes": ("folder:path=.", long_texts),
    "packed rows of Arrow": ("folder:path=.", packed_texts),
    "a billion rows of nothing": ("folder:path=.", rows_of_nothing),
    "texts that lie elsewhere": ("folder:path=.", texts_elsewhere),
    "110 million rows": ("table:path=rows.parquet,target=y", rows_bomb),
    "200 MB of text": ("text:path=notes.txt", sparse("notes.txt", 200 * 2**20)),
    "a terabyte of text": ("text:path=notes.txt", sparse("notes.txt", 2**40)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_stands_for_more_is_refused(
    stage: Stage,
    idle: int,  # noqa: F811
    tmp_path: Path,
    name: str,
    count: Count,
) -> None:
    spec, make = HOSTILE[name]
    make(tmp_path)
    refused(stage, idle, tmp_path, *TRAIN, spec)
    count("small files that stand for more")


def tensors(path: Path, number: int) -> None:
    head = {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(number)}
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_million_tensors_are_refused(stage: Stage, idle: int, tmp_path: Path, count: Count) -> None:  # noqa: F811
    tensors(tmp_path / "update.safetensors", 10**6)
    words = ("--update", "update.safetensors", *SMALL[:2], "--input-shape", "1x8x8")
    found = refused(stage, idle, tmp_path, "audit", *words)
    assert "a header of" in found.err
    tensors(tmp_path / "update.safetensors", 150_000)
    assert "150,000 tensors" in refused(stage, idle, tmp_path, "audit", *words).err
    count("small files that stand for more")


def test_arrays_that_declare_more_than_there_is_are_refused(tmp_path: Path, count: Count) -> None:
    for shape in ("(1099511627776,)", "(2147483647, 1000)", "(-5,)"):
        head = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            file.writestr("a.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head)
        (tmp_path / "a.npz").write_bytes(out.getvalue())
        with pytest.raises(GradveilError, match="cannot be read"):
            read_arrays(tmp_path / "a.npz")
        count("small files that stand for more")


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("number", [30_000])
def test_text_labels_take_time_that_grows_with_the_file(tmp_path: Path, number: int, count: Count) -> None:
    """Two examples each of that many labels: before, three loops over all labels lay within each other."""
    lines = "".join(f"label{i}\tsome words here\n" for i in range(number)) * 2
    (tmp_path / "notes.txt").write_text(lines)
    assert seconds(lambda: load(f"text:path={tmp_path}/notes.txt")) < 20
    count("large files in time")


def test_indices_by_label_are_those_of_the_plain_way() -> None:
    labels = np.random.default_rng(0).integers(0, 9, 200) * 7 - 3
    for ours, plain in zip(by_label(labels), [np.flatnonzero(labels == v) for v in np.unique(labels)], strict=True):
        assert (ours == plain).all()
    assert seconds(lambda: by_label(np.arange(200_000))) < 5


def test_memory_that_does_not_suffice_is_one_line(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(input_shape, num_classes):\n    raise MemoryError\n")
    (tmp_path / "big.py").write_text("import torch\ndef data():\n    return torch.zeros(2**48)\n")
    for words in (("--model", "own:make"), ("--dataset", "big:data")):
        (found,) = stage.run(Act(("train", "--rounds", "1", *words, "--out", "run"), str(tmp_path)))
        assert found.code == 2, found
        assert one_line(found), found


def test_whole_files_are_read_as_before(tmp_path: Path) -> None:
    rows = [{"bytes": png(image), "path": None} for image in pixels(300, 1, 8)]
    table = pa.table({"image": rows, "label": np.arange(300) % 3})
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=7)
    found = load(f"folder:path={tmp_path}")
    assert len(found.train) + len(found.test) == 300
