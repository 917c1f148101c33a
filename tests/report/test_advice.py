"""One recommendation, by what was found: what holds, what to try next, or that nothing can be concluded."""

from pathlib import Path

import pytest

from gradveil.experiments.judge import verdicts
from gradveil.experiments.rows import modality_of
from gradveil.report.advice import Advice, advice, tiers_tried, verdict_sentence
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
    assert "Gaussian noise, std 0.1" in found.text
    assert found.cost.startswith("23.0 points of accuracy")  # 0.93 - 0.7
    assert "70.0%, against 93.0% without a defence" in found.cost
    assert found.command == f"gradveil train --model lenet --dataset digits --defense {HOLDS}"


@pytest.mark.parametrize("defenses", [("none", HOLDS), ("none", BROKEN)])
def test_a_table_dealt_out_by_a_column_stays_so(tmp_path: Path, defenses: tuple[str, ...]) -> None:
    store = write_run(tmp_path / "run", {name: SCENE[name] for name in defenses})
    spec = "table:path=patients.csv,target=outcome,by=hospital"
    config = CONFIG | {"dataset": spec, "partition": "natural"}
    found = advice(verdicts(store.rows), config)
    assert found is not None
    assert f"--dataset {spec} --partition natural --defense" in found.command
    assert "--partition" not in advised(tmp_path / "other", *defenses).command


def test_where_nothing_holds_veil_is_next(tmp_path: Path) -> None:
    found = advised(tmp_path / "run", "none", BROKEN, "pruning:share=0.8")
    assert found.text.startswith("Rely on none of these.")
    assert found.cost.startswith("Not measured in this audit")
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
    assert found.text.startswith("Rely on none of these.")


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
    assert [name.partition(" (")[0] for name in tried] == ["naive server", "server that knows"]
    assert [name.partition(" (")[0] for name in missing] == ["informed server", "patient server", "malicious server"]


@pytest.mark.parametrize(
    ("defenses", "sentence"),
    [
        (("none",), "Without a defence a server gets the images back."),
        (("none", BROKEN), "The defence does not keep the images from the server."),
        (("none", BROKEN, "pruning:share=0.8"), "None of the 2 defences keeps the images from the server."),
        (("none", HOLDS), "The defence kept the images from every server that was tried."),
        (
            ("none", BROKEN, HOLDS),
            "1 of 2 defences kept the images from every server that was tried: Gaussian noise, std 0.1.",
        ),
        (
            ("none", BROKEN, "<script>alert(1)</script>"),
            "No defence is shown to keep the images from the server: of 2, 1 gave them away, 1 could not be judged.",
        ),
    ],
)
def test_the_first_sentence_is_the_verdict(tmp_path: Path, defenses: tuple[str, ...], sentence: str) -> None:
    store = write_run(tmp_path / "run", {name: SCENE[name] for name in defenses})
    assert verdict_sentence(verdicts(store.rows), modality_of(store.rows)) == sentence
    store.close()
    page = write_report(tmp_path / "run").read_text()
    assert page.index(sentence) < page.index("What to do")
