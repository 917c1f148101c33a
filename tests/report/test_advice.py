"""One recommendation, by what was found: what holds, what to try next, or that nothing can be concluded."""

from pathlib import Path

from gradveil.experiments.judge import verdicts
from gradveil.report.advice import Advice, advice, tiers_tried
from gradveil.report.page import write_report
from report.conftest import SCENE, write_run

CONFIG = {"model": "lenet", "dataset": "digits"}
BROKEN = "representation:share=0.4"
HOLDS = "gaussian:std=0.1"


def advised(folder: Path, *defenses: str) -> Advice:
    store = write_run(folder, {name: SCENE[name] for name in defenses})
    found = advice(verdicts(store.rows), CONFIG)
    assert found is not None
    return found


def test_what_holds_is_recommended_with_its_cost_and_its_command(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, HOLDS)
    assert HOLDS in found.text
    assert "23.0 points" in found.text  # 0.93 - 0.7
    assert found.command == f"gradveil train --model lenet --dataset digits --defense {HOLDS}"


def test_where_nothing_holds_veil_is_next(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, "pruning:share=0.8")
    assert found.text.startswith("No defence tried here holds.")
    assert found.command.endswith("--defense veil:promise=reconstruction")


def test_a_defence_that_another_tier_broke_is_not_recommended(tmp_path: Path) -> None:
    scene = {name: SCENE[name] for name in ("none", HOLDS)}
    store = write_run(tmp_path / "run", scene)
    rows = [dict(row) for row in store.rows]
    more = [
        row | {"server": "whiten", "tier": "patient", "mse": 1e-6, "identified": 1.0}
        for row in rows
        if row["kind"] == "attack" and row["defense"] == HOLDS and row["server"] == "whiten"
    ]
    found = advice(verdicts([*rows, *more]), CONFIG)
    assert found is not None
    assert found.text.startswith("No defence tried here holds.")


def test_where_attacks_fail_without_a_defence_nothing_is_called_safe(tmp_path: Path) -> None:
    weak = (0.93, {("naive", "newton"): 0.2})
    store = write_run(tmp_path / "run", {"none": weak, HOLDS: (0.7, {("naive", "newton"): 0.3})})
    found = advice(verdicts(store.rows), CONFIG)
    assert found is not None
    assert "before you call this safe" in found.text


def test_the_page_says_against_whom_and_what_to_do(run_folder: Path) -> None:
    page = write_report(run_folder).read_text()
    assert "Against whom" in page
    assert "What to do" in page
    tried, missing = tiers_tried(verdicts(write_run(run_folder.parent / "again", SCENE).rows))
    assert tried == ["naive server", "server that knows"]
    assert missing == ["informed server", "patient server", "malicious server"]
