"""Mat files of level 5 are read as SciPy reads them, within limits; files at which SciPy dies are refused."""

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from gradveil.data import load
from gradveil.data.mat import read_mat
from gradveil.errors import DataError

MOST = 2**20
HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
# found by flipping bits of valid files: SciPy 1.17.1's loadmat ends each time with a segmentation fault
DEADLY = (
    "0e00000050000000060000000800000209000000000000000500000010000000020000000200000003000000020000000100010058000000"
    "00000000000000008000000000000000000000000e0000003000000006000000080000000900000000000100000001000100790000000200"
    "020001010000",
    "0e00000078000000060000000800000002000000000000000500000008000000010000000100000001000100580000000500040002000000"
    "01000200610000000e0000003800000006000000080000000e00008500000000050000000800000001000000010000000100000000000000"
    "4c0000000800000001000000000000000e000000300000000600000008000000ffffffff0000000005000000080000000200000001000000"
    "01000100790000000200020001010000",
)
KINDS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")


def written(packed: bool = False, **arrays: Any) -> bytes:
    out = io.BytesIO()
    savemat(out, arrays, do_compression=packed)
    return out.getvalue()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_every_type_are_those_that_scipy_reads(kind: str, packed: bool) -> None:
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 1), (2, 3, 4, 5), (0, 2)):
        values = rng.integers(0, 100, shape).astype(kind)
        content = written(packed, other="text", X=values, more={"a": 1}, y=np.arange(3))
        found = read_mat(content, ("X", "y"), MOST)
        right = loadmat(io.BytesIO(content))["X"]
        assert found["X"].dtype == right.dtype == values.dtype
        assert (found["X"] == right).all()
        assert found["X"].shape == shape
        assert found["y"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("body", DEADLY)
def test_a_file_that_ends_scipy_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "svhn").mkdir()
    for part in ("train", "test"):
        (tmp_path / f"svhn/{part}_32x32.mat").write_bytes(HEADER + bytes.fromhex(body))
    with pytest.raises(DataError, match=r"train_32x32\.mat cannot be read") as refused:
        load("svhn", tmp_path)
    assert "\n" not in str(refused.value)


def part(kind: int, data: bytes) -> bytes:
    return np.array([kind, len(data)], "<u4").tobytes() + data + bytes(-len(data) % 8)


def array(name: bytes = b"X", shape: tuple[int, ...] = (1, 4), flags: int = 9, values: bytes = b"1234") -> bytes:
    heads = part(6, np.array([flags, 0], "<u4").tobytes()) + part(5, np.array(shape, "<i4").tobytes()) + part(1, name)
    return part(14, heads + part(2, values))


def packed(content: bytes) -> bytes:
    raw = zlib.compress(content, 9)
    return np.array([15, len(raw)], "<u4").tobytes() + raw


def test_the_files_made_here_are_read() -> None:
    for made in (array(), packed(array())):
        assert bytes(read_mat(HEADER + made, ("X",), MOST)["X"].tobytes()) == b"1234"


HOSTILE = {
    "nothing": (b"", "header"),
    "high bytes first": (HEADER[:-4] + b"\1\0MI" + array(), "header"),
    "another name": (HEADER + array(b"Y"), "no array of numbers named X"),
    "a text": (HEADER + array(flags=4), "no array of numbers named X"),
    "complex numbers": (HEADER + array(flags=9 | 0x800), "no array of numbers named X"),
    "more numbers than there are": (HEADER + array(shape=(2**31 - 1,) * 32), "4 numbers"),
    "sides below zero": (HEADER + array(shape=(-2, -2)), "4 numbers"),
    "a shape without end": (HEADER + array(shape=(1,) * 10_000), "flags, shape and name"),
    "a name without end": (HEADER + array(b"X" * 10_000), "flags, shape and name"),
    "half an array": (HEADER + array()[:-9], "are left"),
    "an empty array": (HEADER + part(14, b""), "flags, shape and name"),
    "a part of four bytes that has five": (HEADER + part(14, b"\6\0\5\0" + bytes(8)), "are left"),
    "a tag cut off": (HEADER + b"\x0e\0\0", "within a tag"),
    "half a packed part": (HEADER + np.array([15, 20], "<u4").tobytes() + zlib.compress(array(), 9)[:20], "ends early"),
    "a bomb": (HEADER + packed(array(values=bytes(2 * MOST), shape=(2 * MOST,))), "too many bytes"),
    "a bomb in small parts": (HEADER + packed(array(b"Y", values=bytes(MOST // 2))) * 3, "too many bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str) -> None:
    content, said = HOSTILE[name]
    with pytest.raises(ValueError, match=said):
        read_mat(content, ("X",), MOST)
