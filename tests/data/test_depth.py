"""Images of every depth are read by the range of their set, or refused (silent damage of data)."""

import io
import logging
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import gradveil
from gradveil.data import load
from gradveil.data.images import decode_images, levels_of
from gradveil.errors import DataError
from gradveil.report.page import render
from gradveil.threats.setup import AuditConfig


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))


def file(values: np.ndarray, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(values).save(out, kind, **how)
    return out.getvalue()


def twelve_bits(values: np.ndarray) -> bytes:
    """A TIFF whose pixels have twelve bits each, packed."""
    flat = values.reshape(-1, 2).astype(np.uint32)
    three = [flat[:, 0] >> 4, (flat[:, 0] & 15) << 4 | flat[:, 1] >> 8, flat[:, 1] & 255]
    raw = np.stack(three, 1).astype(np.uint8).tobytes()
    height, width = values.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(raw)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 8 + len(raw)) + raw + struct.pack("<H", len(tags)) + entries + bytes(4)


def pgm(values: np.ndarray) -> bytes:
    return b"P5 %d %d 65535\n" % values.shape[::-1] + values.astype(">u2").tobytes()


def decoded(*encoded: bytes, **how: Any) -> np.ndarray:
    return decode_images(encoded, levels=levels_of(encoded), **how)


def by_hand(values: np.ndarray) -> np.ndarray:
    """The same in 256 levels, from the lowest value to the highest."""
    x = values.astype(np.float64)
    return np.rint(255 * (x - x.min()) / (x.max() - x.min())).astype(np.uint8)


WAYS = {
    "16-bit PNG": lambda x: file(x.astype(np.uint16), "PNG"),
    "16-bit TIFF": lambda x: file(x.astype(np.uint16), "TIFF"),
    "16-bit TIFF, packed": lambda x: file(x.astype(np.uint16), "TIFF", compression="tiff_lzw"),
    "16-bit TIFF, high byte first": lambda x: file(x.astype(">u2"), "TIFF"),
    "12-bit TIFF": lambda x: twelve_bits(x),
    "16-bit PGM": lambda x: pgm(x),
    "int32 TIFF": lambda x: file(x.astype(np.int32), "TIFF"),
    "negative TIFF": lambda x: file(x.astype(np.int32) - 2000, "TIFF"),
    "float TIFF": lambda x: file(x.astype(np.float32), "TIFF"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("highest", [4095, 1000, 255, 3])
def test_every_depth_is_read_by_its_own_range(way: str, highest: int) -> None:
    values = np.random.default_rng(highest).integers(0, highest + 1, (3, 8, 6))
    values[0, 0, 0], values[1, 0, 0] = 0, highest
    found = decoded(*(WAYS[way](x) for x in values))
    assert found.shape == (3, 1, 8, 6)
    assert (found[:, 0] == by_hand(values)).all()


@given(st.integers(0, 60_000), st.integers(1, 5_000), st.sampled_from(["16-bit PNG", "int32 TIFF", "float TIFF"]))
def test_steps_are_kept_apart_and_in_order(low: int, width: int, way: str) -> None:
    values = np.linspace(low, low + width, 48).astype(np.int64).reshape(6, 8)
    found = decoded(WAYS[way](values)).reshape(-1).astype(int)
    assert found[0] == 0
    assert found[-1] == 255
    assert (np.diff(found) >= 0).all()
    assert len(set(found)) == len(set(values.reshape(-1).tolist()))


def test_floats_from_0_to_1_are_taken_as_they_are() -> None:
    x = np.random.default_rng(0).uniform(0.2, 0.7, (8, 8)).astype(np.float32)
    assert (decoded(file(x, "TIFF"))[0, 0] == np.rint(255 * x.astype(np.float64))).all()


def test_eight_bits_stay_as_they_are() -> None:
    x = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert levels_of([file(x, "PNG")]) is None
    assert (decoded(file(x, "PNG"), file(x, "TIFF"))[1, 0] == x).all()


def test_deep_images_are_scaled_and_made_colours_like_others() -> None:
    x = np.full((8, 8), 1000, np.uint16)
    x[4:] = 3000
    small = decoded(file(x, "PNG"), size=4, grey=False)
    assert small.shape == (1, 3, 4, 4)
    assert small[0, 1, 0].tolist() == [0] * 4
    assert small[0, 2, 3].tolist() == [255] * 4


U16, U8 = np.arange(64, dtype=np.uint16).reshape(8, 8) * 900, np.arange(64, dtype=np.uint8).reshape(8, 8)
REAL = U16.astype(np.float32)


def colours_of_16_bits() -> bytes:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(6 * 4) for _ in range(4))
    head = struct.pack(">IIBBBBB", 4, 4, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def pages() -> bytes:
    out = io.BytesIO()
    Image.fromarray(U16).save(out, "TIFF", save_all=True, append_images=[Image.fromarray(U16)])
    return out.getvalue()


AMBIGUOUS = {
    "one of 8 bits": ([file(U16, "PNG"), file(U8, "PNG")], "8 bits"),
    "one of 16 bits": ([file(U8, "PNG"), file(U16, "PNG")], "more than 8 bits"),
    "real and whole": ([file(U16, "TIFF"), file(REAL, "TIFF")], "real numbers"),
    "NaN": ([file(REAL + np.nan, "TIFF")], "NaN"),
    "infinite": ([file(REAL + np.inf, "TIFF")], "NaN or infinite"),
    "one value": ([file(U16 * 0 + 7, "PNG")], "nothing to see"),
    "colours of 16 bits": ([colours_of_16_bits()], "16 bits"),
    "white is 0": ([file(U16, "TIFF", tiffinfo={262: 0})], "white is 0"),
    "two pages": ([pages()], "2 pages"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_cannot_be_told_is_refused(name: str) -> None:
    encoded, words = AMBIGUOUS[name]
    with pytest.raises(DataError, match=words):
        decoded(*encoded)


def test_the_range_is_of_both_splits_and_stands_in_the_log_and_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    for part, low in (("train", 500), ("test", 100)):
        for label in "ab":
            for i in range(12):
                path = tmp_path / f"set/{part}/{label}/{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file(rng.integers(low, 4001, (8, 8)).astype(np.uint16), "PNG"))
    (tmp_path / "set/test/a/0.png").write_bytes(file(np.arange(64).reshape(8, 8).astype(np.uint16) + 99, "PNG"))
    (tmp_path / "set/train/a/0.png").write_bytes(file(np.full((8, 8), 4095, np.uint16), "PNG"))
    for _ in range(2):  # decoded, and from the cache
        caplog.clear()
        with caplog.at_level(logging.INFO, "gradveil"):
            found = load(f"folder:path={tmp_path}/set")
        assert found.levels == (99, 4095)
        assert "99 is black and 4095 white" in caplog.text
    config = AuditConfig(rounds=1, images=1, clients=1, partition="iid:devices=2", meter_seconds=0.0)
    done = gradveil.audit(
        dataset=found, model="logistic", attacks=["analytic"], defenses=["none"], config=config, out=tmp_path / "run"
    )
    assert "the lowest value 99 is black, the highest 4095 white, in 256 levels" in render(done.store)
