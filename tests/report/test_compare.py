"""Runs side by side: what changed is said, with intervals; runs that are of different things are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from browsing import faint, open_page
from gradveil.report.compare import Comparison, compare, write_comparison
from report.conftest import SCENE, Scene, write_run

NOISE = "gaussian:std=0.1"
PRUNING = "pruning:share=0.8"


def run_of(folder: Path, **changed: float) -> Path:
    """Write a run without a defence, with pruning and with noise; ``changed``: the error of the server that knows."""
    scene: Scene = {"none": SCENE["none"], PRUNING: SCENE[PRUNING], NOISE: SCENE[NOISE]}
    if "noise" in changed:
        scene[NOISE] = (0.5, {("oblivious", "newton"): 0.2, ("whiten", "newton"): changed["noise"]})
    if "pruning" in changed:
        scene[PRUNING] = (0.92, {("oblivious", "newton"): 0.03, ("mask", "newton"): changed["pruning"]})
    write_run(folder, scene).close()
    return folder


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    first = run_of(tmp_path / "first")
    return compare([first, run_of(tmp_path / "same"), run_of(tmp_path / "other", noise=1e-6, pruning=2e-3)])


def test_what_changed_is_said_and_what_did_not_is_not(found: Comparison) -> None:
    said = found.said
    assert said[0] == "The runs have the same settings."
    assert said[1] == "same: no verdict changed, and no error moved beyond the intervals."
    noise = "other, Gaussian noise, std 0.1, adaptive server: Nothing found → Images recovered, worse for the client."
    assert noise in said
    moved = "other, Smallest gradients left out (pruning), share 80 %, adaptive server: error higher"
    assert any(text.startswith(moved) for text in said)
    assert not any("No defence" in text for text in said)


def test_an_error_within_the_intervals_did_not_move(tmp_path: Path) -> None:
    found = compare([run_of(tmp_path / "first"), run_of(tmp_path / "near", pruning=5.5e-4)])
    (line,) = [line for line in found.lines if line.spec == PRUNING and line.who == "Adaptive server"]
    assert line.cells[0].figure != line.cells[1].figure
    assert found.said[1] == "near: no verdict changed, and no error moved beyond the intervals."


def test_every_cell_has_its_interval_and_the_score_its_difference(found: Comparison) -> None:
    line = next(line for line in found.lines if line.spec == NOISE and line.who == "Adaptive server")
    assert [cell.outcome for cell in line.cells] == ["nothing", "nothing", "recovered"]
    assert all("[" in cell.figure and "identified" in cell.figure for cell in line.cells)
    score = next(line for line in found.lines if line.spec == NOISE and line.who == "Accuracy")
    assert [(cell.badge, cell.change) for cell in score.cells] == [
        ("70.0%", ""),
        ("70.0%", ""),
        ("50.0%", "-20.0 points"),
    ]


def test_settings_that_differ_are_shown_and_a_missing_defence_is_said(tmp_path: Path) -> None:
    first = run_of(tmp_path / "first")
    write_run(tmp_path / "few", {"none": SCENE["none"]}, images=4).close()
    found = compare([first, tmp_path / "few"])
    assert dict(found.settings)["images"] == ["8", "4"]
    assert any(text.startswith("Not in few: ") and "Gaussian noise, std 0.1" in text for text in found.said)
    assert not any("Gaussian" in text and "→" in text for text in found.said)


def test_the_command_compares_and_draws_a_page(tmp_path: Path, command: Any) -> None:
    folders = [str(run_of(tmp_path / "a")), str(run_of(tmp_path / "b", noise=1e-6))]
    code, out, _ = command("report", *folders, "--out", str(tmp_path / "page.html"))
    assert code == 0
    assert "Nothing found → Images recovered" in " ".join(out.split())
    assert "Nothing found → Images recovered" in (tmp_path / "page.html").read_text()
    code, out, _ = command("report", *folders, "--out", str(tmp_path / "page.html"), "--json")
    assert code == 0
    assert json.loads(out)["names"] == ["a", "b"]


def test_runs_that_cannot_be_compared_are_refused_in_one_line(tmp_path: Path, command: Any) -> None:
    first = run_of(tmp_path / "a")
    other = run_of(tmp_path / "b")
    config = other / "config.toml"
    config.write_text(config.read_text().replace('dataset = "digits"', 'dataset = "mnist"'))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.toml").write_text('dataset = "digits"\n')
    for second, said in (
        (other, "a is of the data set digits and b of the data set mnist"),
        (tmp_path / "c", "has no verdicts to compare"),
        (tmp_path / "nowhere", "not a run folder"),
        (first, "named twice"),
    ):
        code, _, err = command("report", str(first), str(second))
        assert code == 2
        assert said in err
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone_and_can_be_read(browser: Any, found: Comparison, tmp_path: Path, scheme: str) -> None:
    address = write_comparison(found, tmp_path / "page.html").resolve().as_uri()
    page, trouble = open_page(browser, address, 360, scheme)
    assert trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert faint(page) == []
    page.close()
