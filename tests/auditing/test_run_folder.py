import errno
import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradveil import files
from gradveil.auditing import run_folder
from gradveil.auditing.run_folder import FolderError, RunFolder
from gradveil.files import WriteError


@dataclass(frozen=True)
class Settings:
    dataset: str = "digits"
    seed: int = 0


def start(path: Path, resume: bool = False, **changed: Any) -> RunFolder:
    return RunFolder.start(path, Settings(**changed), resume)


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{"mse": 0.1, "name": "ε"}, {"mse": 0.2}])
    run.add("b", [{"mse": 0.3}])
    again = RunFolder.open(tmp_path / "run")
    assert again.rows == run.rows
    assert [row["mse"] for row in again.rows] == [0.1, 0.2, 0.3]
    assert again.done("a")
    assert again.done("b")
    assert not again.done("c")


def test_images_come_back_exactly(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    image = np.random.default_rng(0).random((2, 1, 8, 8), dtype=np.float32)
    run.add("first/none/dlg:steps=3", [{"mse": 0.1}], {"found": image})
    again = RunFolder.open(tmp_path / "run")
    assert np.array_equal(again.arrays("first/none/dlg:steps=3")["found"], image)
    assert again.arrays("elsewhere") == {}


def test_units_with_like_names_keep_their_own_images(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    for i, unit in enumerate(("a/b", "a_b", "a:b", "x" * 200, "x" * 201)):
        run.add(unit, [{}], {"found": np.array([i])})
    assert [int(run.arrays(u)["found"][0]) for u in ("a/b", "a_b", "a:b", "x" * 200, "x" * 201)] == [0, 1, 2, 3, 4]


def test_a_unit_is_never_written_twice(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{}])
    with pytest.raises(FolderError, match="already"):
        run.add("a", [{}])


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_torn_last_line_is_dropped_with_the_whole_unit_it_belongs_to(tmp_path: Path, cut: int) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{"mse": 0.1}])
    run.add("b", [{"mse": 0.2}, {"mse": 0.3}])
    path = tmp_path / "run" / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = RunFolder.open(tmp_path / "run")
    if cut == 1:  # only the line end is gone: the row is whole
        assert [row["mse"] for row in again.rows] == [0.1, 0.2, 0.3]
        return
    assert [row["mse"] for row in again.rows] == [0.1]
    assert not again.done("b")
    again.add("b", [{"mse": 0.2}, {"mse": 0.3}])
    assert [row["mse"] for row in RunFolder.open(tmp_path / "run").rows] == [0.1, 0.2, 0.3]


def test_a_broken_line_in_the_middle_is_an_error_and_not_forgotten(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{}, {}])
    path = tmp_path / "run" / "rows.jsonl"
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(FolderError, match="Line 1"):
        RunFolder.open(tmp_path / "run")


def test_what_is_not_a_finite_number_is_null_and_the_file_is_json(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{"mse": float("nan"), "psnr": float("inf"), "more": {"x": [float("-inf"), 1.0]}}])
    (line,) = (tmp_path / "run" / "rows.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["mse"], row["psnr"], row["more"]) == (None, None, {"x": [None, 1.0]})


def test_an_existing_run_is_not_overwritten_unless_continued(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.add("a", [{"mse": 0.1}])
    with pytest.raises(FolderError, match="--resume"):
        start(tmp_path / "run")
    assert start(tmp_path / "run", resume=True).done("a")


def test_a_run_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    with pytest.raises(FolderError, match="seed was 0, now 1"):
        start(tmp_path / "run", resume=True, seed=1)
    RunFolder.start(tmp_path / "run", Settings(seed=1), resume=True, may_change={"seed"})
    assert RunFolder.open(tmp_path / "run").config == 'dataset = "digits"\nseed = 1\n'


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(FolderError, match="not an empty folder"):
        start(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="not a run folder"):
        RunFolder.open(tmp_path)


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_line_and_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path / "run")
    run.add("a", [{"mse": 0.1}])
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(WriteError, match="No space left") as error:
        run.add("b", [{"mse": 0.2}])
    assert "\n" not in str(error.value)
    assert not run.done("b")
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before
    assert [row["mse"] for row in RunFolder.open(tmp_path / "run").rows] == [0.1]


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "fsync", full_disk)
    with pytest.raises(WriteError, match="No space left"):
        start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_records_the_versions_it_was_made_with(tmp_path: Path) -> None:
    start(tmp_path / "run")
    text = (tmp_path / "run" / "versions.toml").read_text()
    assert "torch = " in text
    assert "python = " in text
    assert (tmp_path / "run" / "config.toml").read_text() == 'dataset = "digits"\nseed = 0\n'


def test_a_folder_has_one_process_at_a_time(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.add("a", [{}])
        with pytest.raises(FolderError, match=rf"Another process \(pid {os.getpid()} on .*\) is at work in"):
            start(tmp_path / "run", resume=True)
        assert RunFolder.open(tmp_path / "run").done("a")  # reading is free
    assert not (tmp_path / "run" / ".lock").exists()
    start(tmp_path / "run", resume=True).close()


HOLD = """
import sys
from gradveil.auditing.run_folder import RunFolder
folder = RunFolder(sys.argv[1]).hold()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(FolderError, match=rf"pid {other.pid} "):
            start(tmp_path / "run", resume=True)
        other.kill()
    assert (tmp_path / "run" / ".lock").exists()  # the file, with nobody behind it
    start(tmp_path / "run", resume=True).close()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"config.toml", "versions.toml"}


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_kill_left_before_there_were_settings_is_in_nobodys_way(tmp_path: Path, resume: bool) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("versions.toml", ".lock", ".config.toml.12-0123abcd.tmp"):
        (run / name).write_text("")
    start(run, resume=resume).close()
    assert {p.name for p in run.iterdir()} == {"config.toml", "versions.toml"}


def test_leftovers_of_a_kill_are_removed_when_a_run_goes_on(tmp_path: Path) -> None:
    with start(tmp_path / "run") as run:
        run.add("a", [{}], {"image": np.zeros(1)})
    kept = {p for p in run.path.rglob("*") if p.is_file()}
    for name in (".rows.jsonl.12.tmp", "images/.a.npz.7-00ffaa11.tmp"):
        (run.path / name).write_text("half")
    (run.path / "notes.tmp").write_text("mine")
    start(tmp_path / "run", resume=True).close()
    assert {p for p in run.path.rglob("*") if p.is_file()} == {*kept, run.path / "notes.tmp"}


@pytest.mark.parametrize("at", range(1, 5))
def test_a_kill_at_any_replace_leaves_a_run_that_goes_on(tmp_path: Path, at: int) -> None:
    code = f"""
import os
real, left = os.replace, [{at}]
def replace(*args):
    left[0] -= 1
    os._exit(9) if left[0] == 0 else real(*args)
os.replace = replace
import numpy as np
from auditing.test_run_folder import start
from pathlib import Path
start(Path({str(tmp_path / "run")!r})).add("a", [{{"mse": 0.1}}], {{"image": np.zeros(1)}})
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, sys.path)])}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 9
    with start(tmp_path / "run", resume=True) as run:
        assert not run.done("a")
        run.add("a", [{"mse": 0.1}])
    assert [row["mse"] for row in RunFolder.open(tmp_path / "run").rows] == [0.1]
    assert not [p for p in (tmp_path / "run").rglob(".*")]


def test_every_write_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, then its new name, then the folder that holds the name."""
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        real_fsync(handle)

    def replace(*args: Any) -> None:
        done.append("name")
        real_replace(*args)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "replace", replace)
    files.write_atomically(tmp_path / "a", b"1")
    assert done == ["file", "name", "folder"]
    done.clear()
    files.append_line(tmp_path / "b", "1")
    files.append_line(tmp_path / "b", "2")
    assert done == ["file", "folder", "file"]


def test_rounds_are_appended_and_a_torn_one_is_dropped(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    for number in (1, 2, 3):
        run.add_round({"round": number, "loss": float("nan")})
    with (run.path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    assert [row["round"] for row in run.rounds] == [1, 2, 3]
    run.keep_rounds(2)
    run.add_round({"round": 3})
    assert run.rounds == [{"round": 1, "loss": None}, {"round": 2, "loss": None}, {"round": 3}]


def test_a_run_that_goes_on_under_other_versions_says_so_in_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with start(tmp_path / "run") as run:
        run.add("a", [{"mse": 0.1}])
        run.add_round({"round": 1})
    before = (tmp_path / "run/versions.toml").read_text()
    with start(tmp_path / "run", resume=True) as run:
        run.add("b", [{"mse": 0.1}])
    assert not caplog.text
    now = run_folder.versions()
    later = {**now, "gradveil": "9.9", "torch": "99.0", "date": "2099-01-01"}
    monkeypatch.setattr(run_folder, "versions", lambda: later)
    with start(tmp_path / "run", resume=True) as run:
        run.add("c", [{"mse": 0.1}])
        run.add_round({"round": 2})
    assert f"gradveil {now['gradveil']} -> 9.9, torch {now['torch']} -> 99.0" in caplog.text
    made = [row.get("versions") for row in RunFolder.open(tmp_path / "run").rows]
    assert made == [None, None, {"gradveil": "9.9", "torch": "99.0"}]
    assert [row.get("versions") for row in run.rounds] == [None, {"gradveil": "9.9", "torch": "99.0"}]
    assert (tmp_path / "run/versions.toml").read_text() == before
