import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil.experiments import run_folder as store_module
from gradveil.experiments.run_folder import Store, StoreError

CONFIG = 'dataset = "digits"\nseed = 0\n'


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{"mse": 0.1, "name": "ε"}, {"mse": 0.2}])
    run.add("b", [{"mse": 0.3}])
    again = Store.open(tmp_path / "run")
    assert again.rows == run.rows
    assert [row["mse"] for row in again.rows] == [0.1, 0.2, 0.3]
    assert again.done("a")
    assert again.done("b")
    assert not again.done("c")


def test_images_come_back_exactly(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    image = np.random.default_rng(0).random((2, 1, 8, 8), dtype=np.float32)
    run.add("first/none/dlg:steps=3", [{"mse": 0.1}], {"found": image})
    again = Store.open(tmp_path / "run")
    assert np.array_equal(again.arrays("first/none/dlg:steps=3")["found"], image)
    assert again.arrays("elsewhere") == {}


def test_units_with_like_names_keep_their_own_images(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    for i, unit in enumerate(("a/b", "a_b", "a:b", "x" * 200, "x" * 201)):
        run.add(unit, [{}], {"found": np.array([i])})
    assert [int(run.arrays(u)["found"][0]) for u in ("a/b", "a_b", "a:b", "x" * 200, "x" * 201)] == [0, 1, 2, 3, 4]


def test_a_unit_is_never_written_twice(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{}])
    with pytest.raises(StoreError, match="already"):
        run.add("a", [{}])


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_with_the_whole_unit_it_belongs_to(tmp_path: Path, cut: int) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{"mse": 0.1}])
    run.add("b", [{"mse": 0.2}, {"mse": 0.3}])
    path = tmp_path / "run" / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = Store.open(tmp_path / "run")
    if cut == 1:  # only the line end is gone: the row is whole
        assert [row["mse"] for row in again.rows] == [0.1, 0.2, 0.3]
        return
    assert [row["mse"] for row in again.rows] == [0.1]
    assert not again.done("b")
    again.add("b", [{"mse": 0.2}, {"mse": 0.3}])
    assert [row["mse"] for row in Store.open(tmp_path / "run").rows] == [0.1, 0.2, 0.3]


def test_a_broken_line_in_the_middle_is_an_error_and_not_forgotten(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{}, {}])
    path = tmp_path / "run" / "rows.jsonl"
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(StoreError, match="Line 1"):
        Store.open(tmp_path / "run")


def test_what_is_not_a_finite_number_is_null_and_the_file_is_json(tmp_path: Path) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{"mse": float("nan"), "psnr": float("inf"), "more": {"x": [float("-inf"), 1.0]}}])
    (line,) = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["mse"], row["psnr"], row["more"]) == (None, None, {"x": [None, 1.0]})


def test_an_existing_run_is_not_overwritten_unless_continued(tmp_path: Path) -> None:
    Store.create(tmp_path / "run", CONFIG).add("a", [{"mse": 0.1}])
    with pytest.raises(StoreError, match="--resume"):
        Store.create(tmp_path / "run", CONFIG)
    assert Store.create(tmp_path / "run", CONFIG, resume=True).done("a")


def test_a_run_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    Store.create(tmp_path / "run", CONFIG)
    with pytest.raises(StoreError, match="seed was 0, now 1"):
        Store.create(tmp_path / "run", CONFIG.replace("0", "1"), resume=True)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(StoreError, match="not an empty folder"):
        Store.create(tmp_path, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a run folder"):
        Store.open(tmp_path)


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Store.create(tmp_path / "run", CONFIG)
    run.add("a", [{"mse": 0.1}])
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    monkeypatch.setattr(store_module.os, "fsync", full_disk)
    with pytest.raises(StoreError, match="No space left") as error:
        run.add("b", [{"mse": 0.2}])
    assert "\n" not in str(error.value)
    assert not run.done("b")
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before
    assert [row["mse"] for row in Store.open(tmp_path / "run").rows] == [0.1]


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.os, "fsync", full_disk)
    with pytest.raises(StoreError, match="No space left"):
        Store.create(tmp_path / "run", CONFIG)
    assert not (tmp_path / "run").exists()


def test_a_run_records_the_versions_it_was_made_with(tmp_path: Path) -> None:
    Store.create(tmp_path / "run", CONFIG)
    text = (tmp_path / "run" / "versions.toml").read_text()
    assert "torch = " in text
    assert "python = " in text
    assert (tmp_path / "run" / "config.toml").read_text() == CONFIG
