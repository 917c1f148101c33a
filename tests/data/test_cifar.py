"""CIFAR-10's Python batches are read without pickle (a data file runs code): what the format needs, and no more."""

import pickle
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.helpers_data import pixels
from gradveil.data.known import Cifar10
from gradveil.errors import DataError


def read(folder: Path, content: bytes) -> tuple[Any, Any]:
    path = folder / "data_batch_1"
    path.write_bytes(content)
    return Cifar10().read((path,) * 6)[1]


class Named:
    """Pickles as a call of a name that must not be found."""

    def __init__(self, module: str, name: str) -> None:
        self.words = f"c{module}\n{name}\n".encode()

    def called(self) -> bytes:
        return b"\x80\x02}U\x04data" + self.words + b")R" + b"sU\x06labels]s."

    def only(self) -> bytes:
        return b"\x80\x02" + self.words + b"0}."


NAMES = [
    ("numpy.f2py.__main__", "dtype"),
    ("numpy.f2py.__main__", "_reconstruct"),
    ("numpy.testing", "ndarray"),
    ("numpy.core", "_reconstruct"),
    ("numpy.core.multiarray", "ndarray"),
    ("numpy", "_reconstruct"),
    ("numpy", "load"),
    ("builtins", "eval"),
    ("os", "system"),
    ("_codecs", "lookup"),
    ("own_module", "dtype"),
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_no_other_name_is_looked_up_or_imported(tmp_path: Path, module: str, name: str) -> None:
    before = set(sys.modules)
    for content in (Named(module, name).called(), Named(module, name).only()):
        with pytest.raises(DataError, match="data_batch_1"):
            read(tmp_path, content)
    assert set(sys.modules) == before


def test_a_batch_as_its_makers_wrote_it(tmp_path: Path) -> None:
    """Python 2, protocol 2: texts are bytes, and the type of the array is spelled out."""
    flat = pixels(2, 3, 32).reshape(2, -1)
    raw = flat.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06K\x00\x85U\x01b\x87Rq\x07"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    names = b"]q\x01(U\x05a.pngU\x05b.pnge"
    head = b"\x80\x02}q\x00(U\x0bbatch_labelU\x15testing batch 1 of 1 U\x06labels]q\x02(K\x06K\x09eU\x04data"
    images, labels = read(tmp_path, head + array + b"U\x09filenames" + names + b"u.")
    assert images.reshape(2, -1).tolist() == flat.tolist()
    assert labels.tolist() == [6, 9]


@pytest.mark.parametrize("protocol", range(2, 5))
@pytest.mark.parametrize("labels_first", [False, True])
def test_batches_that_python_3_wrote(tmp_path: Path, protocol: int, labels_first: bool) -> None:
    flat = pixels(3, 3, 32).reshape(3, -1)
    parts: list[tuple[bytes, Any]] = [(b"data", flat), (b"labels", [1, 2, 3])]
    batch = dict(reversed(parts) if labels_first else parts) | {b"filenames": ["a", "b", "c"], b"more": [4, 5]}
    found = read(tmp_path, pickle.dumps(batch, protocol=protocol))
    assert (found[0].reshape(3, -1) == flat).all()
    assert found[1].tolist() == [1, 2, 3]


FLAT = np.zeros((2, 3072), np.uint8)
WRONG: dict[str, Any] = {
    "labels of another length": {b"data": FLAT, b"labels": [1]},
    "labels that are no numbers": {b"data": FLAT, b"labels": [1.0, 2.0]},
    "labels that are true": {b"data": FLAT, b"labels": [True, False]},
    "a label too high": {b"data": FLAT, b"labels": [1, 10]},
    "floats": {b"data": FLAT.astype(float), b"labels": [1, 2]},
    "another shape": {b"data": FLAT[:, :-1], b"labels": [1, 2]},
    "objects": {b"data": np.array([{}, {}]), b"labels": [1, 2]},
    "no labels": {b"data": FLAT},
    "no table": [1],
    "column by column": {b"data": np.asfortranarray(pixels(2, 3, 32).reshape(2, -1)), b"labels": [1, 2]},
    "labels as an array": {b"data": FLAT, b"labels": np.array([1, 2])},
    "the high byte first": {b"data": FLAT, b"labels": np.array([1, 2], ">i8")},
    "a key that is a number": {1: 2},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_holds_something_else_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="data_batch_1 cannot be read"):
        read(tmp_path, pickle.dumps(WRONG[name], protocol=2))


DOUBLED = b"]q\x00" + b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60))
HOSTILE = {
    "labels that double 60 times": b"}U\x06labels" + DOUBLED + b"h\x3csU\x04dataNs.",
    "a bytearray of 2^31": b"\x80\x05\x96" + struct.pack("<Q", 2**31) + b".",
    "an array of 2^31 labels": (
        b"}U\x06labelscnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01b\x87RsU\x04dataNs."
    ),
    "ten million words": b"]" * 10**7,
    "ten million marks": b"(" * 10**7,
    "a name of nested lists": DOUBLED + b"h\x3ch\x3c\x93.",
    "no end": b"}",
    "nothing": b"",
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_small_file_does_not_take_much(tmp_path: Path, name: str) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path, HOSTILE[name])
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()
