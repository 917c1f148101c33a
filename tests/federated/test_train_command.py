"""``gradveil train`` end to end: the folder it leaves, resume, early stop, spoiled updates and refusals."""

import errno
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from federated.helpers_federated import spoil
from gradveil.auditing.run_folder import MODEL, ROUNDS, RunFolder
from gradveil.auditing.train import TrainConfig, train
from gradveil.cli.train import command
from gradveil.errors import BudgetError, GradveilError
from gradveil.federated.engines import Sequential
from gradveil.federated.server import Checkpoint
from gradveil.federated.simulate import choose

QUICK = {"model": "logistic", "partition": "iid:devices=4,per_device=40", "clients": 2, "rounds": 3, "lr": 0.5}


def run(folder: Path, resume: bool = False, **changes: Any) -> dict[str, Any]:
    return train(TrainConfig(**QUICK | changes), folder, resume=resume)


def test_a_run_leaves_settings_versions_rounds_and_weights(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", defense="gaussian:scale=0.001")
    folder = RunFolder(tmp_path / "run")
    config = tomllib.loads((folder.path / "config.toml").read_text())
    assert (config["seed"], config["defense"], config["rounds"]) == (0, "gaussian:scale=0.001", 3)
    assert "torch" in tomllib.loads((folder.path / "versions.toml").read_text())
    rows = folder.rounds
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(0 <= row["accuracy"] <= 1 and row["loss"] > 0 and row["accepted"] == 2 for row in rows)
    assert summary["accuracy"] == rows[-1]["accuracy"] > 0.2
    assert summary["rounds"] == 3
    assert not summary["stopped_early"]
    assert Checkpoint.read(folder.path / MODEL).round == 3


@pytest.mark.parametrize("tier", ["local", "aggregate"])
def test_in_process_the_tier_of_sums_is_named_simulated(tmp_path: Path, tier: str) -> None:
    bought = run(tmp_path, rounds=1, batch_size=None, defense=f"veil:z=1,clip=1,tier={tier}")["bought"]
    assert (bought["tier"], bought["simulated"]) == (tier, True)
    named = RunFolder(tmp_path).rounds[0].get("tier")
    assert named == ("aggregate, simulated" if tier == "aggregate" else None)


@pytest.mark.parametrize("aggregator", ["fedavg", "fedavgm"])
def test_a_killed_run_that_is_resumed_ends_as_the_unbroken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aggregator: str
) -> None:
    whole = run(tmp_path / "whole", rounds=5, aggregator=aggregator)
    stopped = {"rounds": 5, "aggregator": aggregator, "save_every": 2}

    def kill(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(TrainConfig(**QUICK | stopped), tmp_path / "cut", progress=kill)
    folder = RunFolder(tmp_path / "cut")
    assert len(folder.rounds) == 3
    with (folder.path / ROUNDS).open("a") as file:
        file.write('{"round": 4, "accu')  # a line cut off
    again = run(tmp_path / "cut", resume=True, **stopped)
    assert [row["round"] for row in folder.rounds] == [1, 2, 3, 4, 5]
    assert again["accuracy"] == whole["accuracy"]
    ours, theirs = (Checkpoint.read(tmp_path / name / "model.safetensors").state for name in ("whole", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_rounds_can_be_added_and_other_settings_cannot_change(tmp_path: Path) -> None:
    run(tmp_path / "run")
    longer = run(tmp_path / "run", resume=True, rounds=5)
    assert longer["rounds"] == 5
    assert longer["accuracy"] == run(tmp_path / "other", rounds=5)["accuracy"]
    with pytest.raises(GradveilError, match=r"lr was 0\.5, now 0\.1"):
        run(tmp_path / "run", resume=True, lr=0.1)
    with pytest.raises(GradveilError, match="--resume"):
        run(tmp_path / "run")
    run(tmp_path / "cosine", schedule="cosine")
    with pytest.raises(GradveilError, match="rounds was 3, now 5"):
        run(tmp_path / "cosine", resume=True, schedule="cosine", rounds=5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    with pytest.raises(GradveilError, match="not an empty folder"):
        run(tmp_path / "full")


def test_a_run_without_progress_stops_early(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", rounds=50, lr=1e-9, early_stop=2)
    assert summary["rounds"] == 3  # the first measurement is the best, two more bring nothing
    assert summary["stopped_early"]
    assert run(tmp_path / "run", rounds=50, lr=1e-9, early_stop=2, resume=True)["rounds"] == 3
    rare = run(tmp_path / "rare", rounds=7, evaluate_every=3)
    measured = [row["round"] for row in RunFolder(tmp_path / "rare").rounds if "accuracy" in row]
    assert measured == [3, 6, 7]
    assert rare["accuracy"] is not None


def test_spoiled_updates_are_counted_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Sequential.start
    monkeypatch.setattr(Sequential, "start", lambda self, world: spoil(honest(self, world), nan=0.3, shape=0.3))
    summary = run(tmp_path / "run", rounds=10)
    assert set(summary["rejected"]) == {"malformed", "not finite"}
    rows = RunFolder(tmp_path / "run").rounds
    assert sum(row["accepted"] for row in rows) + sum(summary["rejected"].values()) == 20


def test_what_was_bought_is_shown_and_more_rounds_than_planned_are_refused(tmp_path: Path) -> None:
    promised = {"defense": "veil:promise=identification", "batch_size": None, "rounds": 2}
    bought = run(tmp_path / "a", **promised)["bought"]
    assert (bought["tier"], bought["limit"], bought["simulated"]) == ("local", 1.0, True)
    assert bought["z_run"] == pytest.approx(1.0)
    assert bought["guess"] == pytest.approx(0.0924, abs=1e-3)
    with pytest.raises(BudgetError, match="Round 3 is refused"):
        run(tmp_path / "a", resume=True, **promised | {"rounds": 4})
    assert [row["round"] for row in RunFolder(tmp_path / "a").rounds] == [1, 2]
    assert "bought" not in run(tmp_path / "b")


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(command)
    return made


@pytest.mark.parametrize(
    ("defense", "changes", "said"),
    [
        ("veil:z=1,tier=aggregate", {"clients": 1}, "fewer than two are left"),
        ("veil:z=1,shape=public", {"partition": "iid:devices=4"}, "there are 0"),
        ("veil:z=1,limit=0.5", {}, "Round 1 is refused"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, defense: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(GradveilError, match=said):
        run(tmp_path / "run", batch_size=None, defense=defense, **changes)
    assert not (tmp_path / "run").exists()


def test_the_command_prints_json_or_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model", "logistic", "--clients", "2", "--rounds", "2", "--batch-size", "0"]
    found = CliRunner().invoke(app(), [*options, "--out", str(tmp_path / "a"), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["rounds"] == 2
    honest = Sequential.start
    monkeypatch.setattr(Sequential, "start", lambda self, world: spoil(honest(self, world), nan=0.5))
    plain = CliRunner().invoke(app(), [*options, "--out", str(tmp_path / "b")])
    assert "after 2 rounds" in plain.stdout
    assert "not finite" in plain.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampling", "sometimes"], "one of without, with"),
        (["--weighting", "heavy"], "one of samples, paper, uniform"),
        (["--superlink", "localhost:1"], "--engine flower"),
        (["--device", "cuda"], "no CUDA device"),
        (["--defense", "nonesuch"], "No defense is called"),
        (["--engine", "flower", "--early-stop", "3"], "not available"),
        (["--engine", "flower", "--verify"], "another engine, or gradveil verify"),
        (["--clients", "99"], "99 clients a round"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    if options == ["--device", "cuda"] and torch.cuda.is_available():
        pytest.skip("this machine has one")
    found = CliRunner().invoke(app(), ["--model", "logistic", "--out", str(tmp_path / "a"), *options])
    assert isinstance(found.exception, GradveilError)
    assert message in str(found.exception)


def test_tensorboard_gets_each_round_and_is_asked_for_where_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "run/tensorboard")

        def add_scalar(self, *row: Any) -> None:
            written.append(row)

        def flush(self) -> None:
            pass

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    train(TrainConfig(**QUICK), tmp_path / "run", tensorboard=True)
    assert [(name, number) for name, _, number in written[:3]] == [("accuracy", 1), ("loss", 1), ("lr", 1)]
    assert len(written) == 9
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(GradveilError, match=r"gradveil\[tensorboard\]"):
        train(TrainConfig(**QUICK), tmp_path / "other", tensorboard=True)


def test_the_engine_is_chosen_by_device_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from federated.helpers_federated import tiny_dataset, tiny_model
    from gradveil.federated.client import Local
    from gradveil.federated.engines import World
    from gradveil.protection.defense import build

    world = World(tiny_model(), tiny_dataset().train, build("none"), Local())
    monkeypatch.setattr("gradveil.federated.simulate.available_cores", lambda: 2)
    assert choose(world, 10) == "sequential"
    assert choose(world, 2000) == "processes"
    monkeypatch.setattr("gradveil.federated.simulate.available_cores", lambda: 1)
    assert choose(world, 2000) == "sequential"


Command = Callable[..., tuple[int, str, str]]
SMALL = ("train", "--model", "logistic", "--partition", "iid:devices=4,per_device=40", "--clients", "2")


def test_what_the_disk_refuses_is_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = command(*SMALL, "--out", "file/run", "--json")
    assert code == 2
    assert err.startswith("gradveil: Cannot write file/run: Not a directory.")
    real, calls = os.fsync, [0]

    def fills_up(handle: int) -> None:
        calls[0] += 1
        if calls[0] > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr("gradveil.files.os.fsync", fills_up)
    code, _, err = command(*SMALL, "--out", "run", "--json")
    assert code == 2
    assert "No space left for run/" in err
    assert len(err.splitlines()) == 1
    monkeypatch.setattr("gradveil.files.os.fsync", real)
    assert command(*SMALL, "--out", "run", "--resume", "--json")[0] == 0
    assert [row["round"] for row in RunFolder("run").rounds] == list(range(1, 21))


def start_process(folder: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "gradveil", *SMALL, "--rounds", "40", "--out", "run", *more]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_rounds(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and len(RunFolder(folder / "run").rounds) < count:
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_do_not_write_one_folder(tmp_path: Path) -> None:
    both = [start_process(tmp_path, "--resume", "--engine", "sequential") for _ in range(2)]
    said = [process.communicate(timeout=300)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) in ([0, 2], [0, 0])  # the second may have come when the first was done
    if 2 in codes:
        other = re.search(r"Another process \(pid (\d+) on", said[codes.index(2)])
        assert other is not None
        assert int(other[1]) != both[codes.index(2)].pid
    assert [row["round"] for row in RunFolder(tmp_path / "run").rounds] == list(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sequential", "processes:workers=2"])
def test_a_run_told_to_end_says_how_to_go_on(tmp_path: Path, engine: str) -> None:
    process = start_process(tmp_path, "--rounds", "100000", "--engine", engine)
    wait_for_rounds(tmp_path, 2, process)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == ("gradveil: stopped. What was finished is kept: continue with --resume --out run.")
    assert "Traceback" not in err
    assert not [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")]
