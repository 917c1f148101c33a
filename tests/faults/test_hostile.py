"""Files and settings that are damaged, or made to do harm: every command ends in one line, soon and small."""

import gzip
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data.helpers_data import pixels, png, write_idx, write_parquet
from faults.conftest import Count
from faults.plays import COMMANDS
from faults.stage import Act, Outcome, Stage, one_line

pytestmark = pytest.mark.slow
Damage = Callable[[Path], Any]
SECONDS = 60.0  # on a machine with other work; each takes about one on an idle one
MEMORY = 2**30  # over what a command that does nothing has


@pytest.fixture(scope="module")
def runs(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of a training run and of an audit."""
    place = tmp_path_factory.mktemp("runs")
    for name in ("train sequential", "audit"):
        (done,) = stage.run(Act((*COMMANDS[name], "--out", name.split()[0]), str(place)))
        assert done.code == 0, done
    return place


@pytest.fixture(scope="module")
def idle(stage: Stage) -> int:
    """The memory of a command that does nothing."""
    return stage.run(Act(("list",), "/"))[0].memory


def refused(stage: Stage, idle: int, folder: Path, *words: str) -> Outcome:
    (found,) = stage.run(Act(words, str(folder)))
    assert found.code == 2, found
    assert one_line(found), found
    assert found.seconds < SECONDS, found
    assert found.memory < idle + MEMORY, found
    return found


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def swapped(name: str, old: str, new: str) -> Damage:
    def change(folder: Path) -> None:
        before = (folder / name).read_text()
        assert old in before
        (folder / name).write_text(before.replace(old, new, 1))

    return change


def metadata(**about: str) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "checkpoint.safetensors"
        save_file(load_file(path), path, {"round": "4", "notes": "{}"} | about)

    return change


def cut(pattern: str, keep: float) -> Damage:
    def change(folder: Path) -> None:
        path = sorted(folder.glob(pattern))[0]
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])

    return change


def linked(name: str) -> Damage:
    """A file of a run that is a link to another one with the same content, or a folder."""

    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return change


TRAIN = {
    "rounds are a link": linked("rounds.jsonl"),
    "a checkpoint that is a link": linked("checkpoint.safetensors"),
    "config is no TOML": text("config.toml", "rounds = = 4"),
    "config is no text": text("config.toml", b"\xff\xfe\0"),
    "config is deep": text("config.toml", "a = " + "[" * 100_000),
    "a setting of another type": swapped("config.toml", "seed = 0", 'seed = {a = "b"}'),
    "rounds are no JSON": text("rounds.jsonl", "{\n"),
    "rounds are no rows": text("rounds.jsonl", "[1]\n"),
    "a round without a number": swapped("rounds.jsonl", '"round": 2', '"round": "x"'),
    "a round without its counts": swapped("rounds.jsonl", '"rejected"', '"nothing"'),
    "an accuracy that is none": swapped("rounds.jsonl", '"accuracy": ', '"accuracy": "high", "was": '),
    "rounds that end early": cut("rounds.jsonl", 0.4),
    "round 1e9 in words": metadata(round="1e9"),
    "round 1000000000": metadata(round="1000000000"),
    "round -1": metadata(round="-1"),
    "no round": lambda folder: save_file(
        load_file(folder / "checkpoint.safetensors"), folder / "checkpoint.safetensors"
    ),
    "notes that are no table": metadata(notes="[1]"),
    "notes that are no JSON": metadata(notes="["),
    "half a checkpoint": cut("checkpoint.safetensors", 0.5),
    "a checkpoint that declares more": text("checkpoint.safetensors", struct.pack("<Q", 2**62) + b"{}"),
}


@pytest.mark.parametrize("name", TRAIN)
def test_a_damaged_training_run_is_not_continued(
    stage: Stage, idle: int, runs: Path, tmp_path: Path, name: str, count: Count
) -> None:
    shutil.copytree(runs / "train", tmp_path / "run")
    TRAIN[name](tmp_path / "run")
    refused(stage, idle, tmp_path, *COMMANDS["train sequential"], "--rounds", "5", "--out", "run", "--resume")
    count("hostile files by hand")


AUDIT = {
    "settings are a link": linked("config.toml"),
    "rows are a link": linked("rows.jsonl"),
    "images are a link": linked("images"),
    "rounds of an audit are a link": lambda folder: (folder / "rounds.jsonl").symlink_to("/etc/passwd"),
    "config is no TOML": text("config.toml", "\0"),
    "config without a model": swapped("config.toml", "model", "muddle"),
    "versions are no TOML": text("versions.toml", "= ="),
    "rows are no JSON": swapped("rows.jsonl", "{", "{{"),
    "rows are numbers": text("rows.jsonl", "1\n2\n"),
    "a row without a unit": swapped("rows.jsonl", '"unit"', '"limit"'),
    "rows that are no numbers": swapped("rows.jsonl", '"mse": ', '"mse": NaN, "was": '),
    "an error in words": swapped("rows.jsonl", '"mse": ', '"mse": "small", "was": '),
    "rows without an error": swapped("rows.jsonl", '"mse"', '"mess"'),
    "half an archive of images": cut("images/*.npz", 0.5),
    "images that are none": lambda folder: sorted(folder.glob("images/*.npz"))[0].write_bytes(b"PK\5\6" + bytes(18)),
}


@pytest.mark.parametrize("name", AUDIT)
def test_a_damaged_audit_is_not_drawn(
    stage: Stage, idle: int, runs: Path, tmp_path: Path, name: str, count: Count
) -> None:
    shutil.copytree(runs / "audit", tmp_path / "run")
    AUDIT[name](tmp_path / "run")
    refused(stage, idle, tmp_path, "report", "run")
    count("hostile files by hand")


@pytest.mark.parametrize("name", ["rows are a link", "rows are numbers", "an error in words", "rows without an error"])
def test_a_damaged_audit_is_not_continued(
    stage: Stage, idle: int, runs: Path, tmp_path: Path, name: str, count: Count
) -> None:
    shutil.copytree(runs / "audit", tmp_path / "run")
    AUDIT[name](tmp_path / "run")
    refused(stage, idle, tmp_path, *COMMANDS["audit"], "--out", "run", "--resume")
    count("hostile files by hand")


def test_a_report_without_versions_is_drawn(stage: Stage, runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "audit", tmp_path / "run")
    (tmp_path / "run" / "versions.toml").unlink()
    (drawn,) = stage.run(Act(("report", "run"), str(tmp_path)))
    assert drawn.code == 0, drawn


def bomb(path: Path) -> None:
    """A PNG of a few kilobytes with 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def images(folder: Path) -> None:
    for path in (folder / label / f"{i}.png" for label in "ab" for i in range(4)):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(pixels(1, 1, 8)[0]))


def with_images(change: Damage = lambda folder: None) -> Damage:
    def make(folder: Path) -> None:
        images(folder)
        change(folder)

    return make


def parquet(labels: Any, about: Any = None, column: Any = None) -> Damage:
    def make(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        write_parquet(folder / "train.parquet", pixels(len(labels), 1, 8), labels)
        table = pq.read_table(folder / "train.parquet")
        if about is not None:
            table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
        if column is not None:
            table = table.set_column(0, "image", pa.array(column))
        pq.write_table(table, folder / "train.parquet")

    return make


def texts(column: Any) -> Damage:
    def make(folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": column, "label": [0, 1] * (len(column) // 2)}), folder / "train.parquet")

    return make


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def packed(change: Callable[[bytes], bytes]) -> Damage:
    def make(folder: Path) -> None:
        write_idx(folder / "mnist", pixels(20, 1, 28), pixels(20, 1, 28), zipped=True)
        path = folder / "mnist" / "train-images-idx3-ubyte.gz"
        path.write_bytes(change(path.read_bytes()))

    return make


def idx_bomb(_: bytes) -> bytes:
    """60,000 x 28 x 28 pixels are declared, and 2 GB of zeros follow."""
    start = gzip.compress(bytes((0, 0, 8, 3)) + np.array((60_000, 2**15, 28), ">u4").tobytes())
    return start + gzip.compress(bytes(2**24)) * 128


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(b ^ 0xFF for b in content[middle : middle + 8]) + content[middle + 8 :]


FOLDER = "folder:path=."
DATA = {
    "a truncated image": (FOLDER, with_images(cut("a/0.png", 0.6))),
    "a decompression bomb": (FOLDER, with_images(lambda folder: bomb(folder / "a" / "0.png"))),
    "a bomb that is scaled": (f"{FOLDER},size=8", with_images(lambda folder: bomb(folder / "b" / "1.png"))),
    "a page that runs a program": (FOLDER, with_images(text("a/0.png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%EndComments\n"))),
    "size -1": (f"{FOLDER},size=-1", with_images()),
    "size 1000000": (f"{FOLDER},size=1000000", with_images()),
    "a lone surrogate in a path": ("folder:path=a\udcffb", with_images()),
    "metadata with a number in it": (FOLDER, parquet([0, 1, 2, 3], {"info": 1})),
    "metadata with names that are none": (
        FOLDER,
        parquet([0, 1, 0, 1], {"info": {"features": {"label": {"names": [1, None]}}}}),
    ),
    "a label of 1e9": (FOLDER, parquet([0, 1, 2, 10**9])),
    "a label of 2^62": (FOLDER, parquet([0, 1, 2, 2**62])),
    "a label below 0": (FOLDER, parquet([0, 1, 2, -1])),
    "labels that are texts": (FOLDER, parquet(["a", "b", "a", "b"])),
    "images that are paths": (FOLDER, parquet([0, 1, 0, 1], column=["/etc/passwd"] * 4)),
    "images that are numbers": (FOLDER, parquet([0, 1, 0, 1], column=[1, 2, 3, 4])),
    "a pipe among the images": (FOLDER, with_images(lambda folder: pipe(folder / "a" / "0.png"))),
    "a pipe in the place of a parquet file": (FOLDER, lambda folder: pipe(folder / "train.parquet")),
    "texts that are numbers": (FOLDER, texts([1, 2, 3, 4])),
    "texts that are lists": (FOLDER, texts([["a b"], ["c"], ["a b"], ["c"]])),
    "half a parquet file": (FOLDER, lambda folder: (parquet([0, 1, 0, 1])(folder), cut("*.parquet", 0.5)(folder))),
    "half a gz": ("mnist", packed(lambda content: content[: len(content) // 2])),
    "a damaged gz": ("mnist", packed(flipped)),
    "a gz of no idx": ("mnist", packed(lambda _: gzip.compress(b"hello"))),
    "a gz bomb": ("mnist", packed(idx_bomb)),
}


@pytest.mark.parametrize("name", DATA)
def test_a_hostile_data_set_is_refused(stage: Stage, idle: int, tmp_path: Path, name: str, count: Count) -> None:
    spec, make = DATA[name]
    make(tmp_path)
    found = refused(stage, idle, tmp_path, "train", "--dataset", spec, "--data", ".", "--rounds", "1", "--out", "run")
    assert not (tmp_path / "run").exists(), found
    count("hostile files by hand")


def test_what_a_file_says_does_not_reach_the_terminal_as_it_is(stage: Stage, idle: int, tmp_path: Path) -> None:
    gradient = {"1.weight": torch.zeros(5, 64), "1.bias": torch.zeros(5)}
    save_file(gradient, tmp_path / "update.safetensors", {"kind": "\x1b[2J" + 5000 * "9"})
    words = ("--update", "update.safetensors", "--model", "logistic", "--input-shape", "1x8x8", "--classes", "5")
    found = refused(stage, idle, tmp_path, "audit", *words)
    assert "\\x1b[2J999" in found.err
    assert len(found.err) < 2100


SETTINGS = {
    "probe:width=-1": ("train", "--model", "probe:width=-1"),
    "exponential:factor=1e308": ("train", "--schedule", "exponential:factor=1e308"),
    "gaussian:scale=inf": ("train", "--defense", "gaussian:scale=inf"),
    "gaussian:scale=nan": ("train", "--defense", "gaussian:scale=nan"),
    "dlg:steps=-1": ("audit", "--attack", "dlg:steps=-1"),
    "an update whose path is a lone surrogate": ("audit", "--update", "\udcff.safetensors", "--classes", "10"),
    "a run folder whose path is one": ("report", "\udcff"),
    "a config that is one": ("audit", "--config", "\udcff.toml"),
    "a pattern that fits nothing": ("reproduce", "meter", "--only", "nomatch*", "--out", "run"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_be_is_refused(stage: Stage, idle: int, tmp_path: Path, name: str, count: Count) -> None:
    refused(stage, idle, tmp_path, *SETTINGS[name])
    assert not list(tmp_path.iterdir())
    count("settings that cannot be, on the command line")
