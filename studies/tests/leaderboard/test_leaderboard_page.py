"""The committed leaderboard: the page says what the rows say, and no attack on it is below a certificate."""

import importlib
import json
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType

import pytest
from scipy.stats import t as student

from gradveil.auditing.run_folder import RunFolder
from gradveil.data import load
from gradveil.privacy.accountant import Account
from gradveil.privacy.plan import class_spectra, floor_share
from gradveil_studies.cli.leaderboard import BoardConfig
from gradveil_studies.leaderboard.attacks import ONE
from gradveil_studies.leaderboard.entries import ENTRIES, PANELS
from gradveil_studies.leaderboard.standings import standings

ROOT = Path(__file__).parents[3]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("pages")


def test_no_committed_attack_is_below_its_certificate(tool: ModuleType) -> None:
    found = standings(tool.own_rows("leaderboard") + tool.promise_rows())
    assert {"digits", "mnist, scatter"} <= {one.dataset for one in found}
    assert {f"{one.defense} on {one.dataset}": one.beaten for one in found if one.beaten} == {}


def test_an_aim_is_called_reached_where_the_interval_of_five_seeds_lies_within_it() -> None:
    rows = json.loads((ROOT / "studies" / "bench" / "results" / "promises.json").read_text())["rows"]
    text = (ROOT / "docs" / "research" / "veil.md").read_text()
    whole: list[float] = []
    for row in rows:
        if row["defense"] == "none":
            whole = row["accuracy"]
            continue
        lost = [100 * (a - b) for a, b in zip(whole, row["accuracy"], strict=True)]
        low, high = student.interval(0.95, len(lost) - 1, fmean(lost), stdev(lost) / sqrt(len(lost)))
        assert (row["low"], row["high"]) == pytest.approx((low, high))
        reached = len(set(row["seeds"])) >= 5 and high <= row["aim"]
        assert (row["verdict"] == "reached") == reached
        cell = f"{fmean(row['accuracy']):.4f} ({min(row['accuracy']):.3f}-{max(row['accuracy']):.3f})"
        said = f"| {cell} | {fmean(lost):.2f} [{low:.2f}, {high:.2f}] |".replace("[-", "[−")
        (line,) = [line for line in text.splitlines() if said in line]
        assert line.endswith(f": {row['verdict']} |")
    part = text[: text.index("\n## ", text.index("promises.py"))]  # rows of other benchmarks come after it
    table = [line for line in part.splitlines() if line.startswith("|")]
    assert sum(": reached |" in line for line in table) == sum(row.get("verdict") == "reached" for row in rows)


def test_committed_floors_are_those_of_plan(tool: ModuleType) -> None:
    spectra = list(class_spectra(load("digits").test.batch(slice(None))).values())
    digits = [row for row in tool.own_rows("leaderboard") if row["kind"] == "client" and row["dataset"] == "digits"]
    floors = {row["floor"]: floor_share(Account("", row["spent"]), spectra) for row in digits if "spent" in row}
    assert len(floors) > 2
    assert list(floors) == pytest.approx(list(floors.values()), rel=1e-9)


def test_no_committed_row_lacks_its_control_its_floor_and_its_strongest_server(tool: ModuleType) -> None:
    for one in standings(tool.own_rows("leaderboard") + tool.promise_rows()):
        if one.got:
            assert one.blind is not None
            assert all(got.line.control is not None for got in one.got), one.defense
            assert "informed" in {got.line.tier for got in one.got}


def test_a_run_is_kept_and_what_was_not_run_is_said(tool: ModuleType, tmp_path: Path) -> None:
    dataset = PANELS["quick"][0].dataset
    about = {"kind": "training", "dataset": dataset, "split": "paper", "defense": "none", "lr": 0.2}
    with RunFolder.start(tmp_path / "run", BoardConfig((), "quick", 0, "cpu")) as folder:
        row = about | {"seed": 0, "multiple": 2, "held_out": 0.5, "accuracy": 0.75}
        folder.add(f"train/{dataset}/paper/none", [row])
        folder.add(f"floors/{dataset}", [{"kind": "floor", "dataset": dataset, "scene": ONE, "guess": "grey",
                                          "example": 0, "mse": 0.1, "identified": 0.0}])  # fmt: skip
    importlib.import_module("results").keep(tmp_path / "run", "a machine", "abc1234", tmp_path)
    made = tool.board(tmp_path)
    tables = tool.markdown(made[dataset][1])
    assert "| none | 0.750 | +0.0 | not run |" in tables
    assert f"| {ENTRIES[1].name} | not run |" in tables
    assert made["mnist"] == ["Not run."]
    assert "a machine; commit abc1234" in made["where the rows come from"][0]


def test_the_readmes_command_is_the_row_it_stands_for() -> None:
    rows = json.loads((ROOT / "studies" / "bench" / "results" / "promises.json").read_text())["rows"]
    (row,) = [r for r in rows if (r["dataset"], r["setting"]) == ("mnist", "aggregate, reconstruction")]
    text = (ROOT / "README.md").read_text()
    command = text[text.index("gradveil train --dataset mnist") :].split("```")[0].replace("\\\n", " ")
    words = command.split("#")[0].split()
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--model"], float(given["--lr"])) == (row["model"], row["choice"][0])
    assert sorted(given["--defense"].split(":")[1].split(",")) == sorted(row["defense"].split(":")[1].split(","))
    assert (int(given["--rounds"]), given["--clients"], given["--batch-size"]) == (row["rounds"], "10", "0")
    assert given["--aggregator"] == "fedavgm"
    assert f"{100 * fmean(row['accuracy']):.1f} %" in command
