"""The item behind every accuracy: what is trained together, what it says, and what the verdict rests on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradveil.protection.defense import DEFENSES
from gradveil_studies.paper import accuracy
from gradveil_studies.paper.accuracy import Accuracy, AccuracyPanel
from gradveil_studies.paper.base import Context
from gradveil_studies.paper.panels import FULL
from gradveil_studies.paper.rows import paired_loss, same_defense

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SMALL = AccuracyPanel(
    "lenet:strides=2/1,activation=tanh,init=kaiming", "digits", 3, ("none", "pruning:share=0.8"), "iid:devices=20"
)


def test_settings_that_train_together_give_what_each_gives_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accuracy.PANELS, "small", SMALL)
    item, context = Accuracy(), Context(scale="full")
    units = ["small/0/none", "small/1/none", "small/0/pruning:share=0.8"]
    together = item.run_group(units, context)
    for unit in units:
        assert together[unit] == item.run(unit, context)
        assert [row["round"] for row in together[unit]] == [1, 2, 3]
    assert together[units[0]][-1]["accuracy"] != together[units[1]][-1]["accuracy"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_rounded_convolutions_follow_the_weights_as_they_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accuracy.PANELS, "small", replace(SMALL, rounds=6, lr=0.3))
    item, context = Accuracy(), Context(scale="full")
    plain = item.run("small/0/none", context)
    monkeypatch.setattr(accuracy, "_is_large", lambda panel, device: True)
    rounded = item.run("small/0/none", context)
    assert rounded[-1]["loss"] < 0.8 * rounded[0]["loss"]
    for mine, other in zip(rounded, plain, strict=True):
        assert mine["loss"] != other["loss"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=0.05)
    monkeypatch.setitem(accuracy.PANELS, "small", replace(SMALL, rounds=6, lr=0.3, bfloat16=False))
    for mine, other in zip(item.run("small/0/none", context), plain, strict=True):
        assert mine | {"loss": 0.0} == other | {"loss": 0.0}
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)  # a sum's last digits hang on where memory lies
    assert {n for n, panel in accuracy.PANELS.items() if not panel.bfloat16} == {"small", "convnet-cifar10-tf32"}


def test_on_cuda_runs_are_grouped_by_what_their_graphs_hold() -> None:
    item, context = Accuracy(), Context(scale="full", device=torch.device("cuda"))
    units = [unit for unit in item.units(context) if unit.startswith("lenet-mnist/1/")]
    groups = item.groups(units, context)
    assert sorted(unit for group in groups for unit in group) == sorted(units)
    together = [group for group in groups if len(group) > 1]
    assert sorted(len(group) for group in together) == [3, 6]  # no defence and noise on weights; scores
    assert all("representation" in unit for unit in max(together, key=len))
    assert all(len(group) == 1 for group in item.groups(units, Context(scale="full")))


def test_every_seed_and_every_level_of_the_paper_is_asked_for() -> None:
    units = Accuracy().units(Context(scale="full"))
    assert len(units) == len(set(units)) == 3 * (23 + 6 + 22 + 21 + 1)
    large = {same_defense(unit.split("/", 2)[2]) for unit in units if unit.startswith("convnet-cifar10/0/")}
    assert large == set(map(same_defense, FULL["gs"]))
    assert "lenet-cifar10/2/laplace:scale=0.1" in units


def test_the_defences_of_all_kept_rows_are_known() -> None:
    rows = [json.loads(line) for path in RESULTS.glob("*/rows.jsonl") for line in path.open(encoding="utf-8")]
    specs = {spec for row in rows if (spec := row.get("defense", "")).startswith("representation")}
    assert "representation_authors:share=0.4" in specs
    assert {same_defense(spec).partition(":")[0] for spec in specs} <= set(DEFENSES.names())


def row(panel: str, defense: str, seed: int, value: float, at: int = 9) -> dict[str, object]:
    return {"panel": panel, "defense": defense, "seed": seed, "round": at, "rounds": 9, "accuracy": value}


def test_the_verdict_follows_the_last_rounds_means() -> None:
    rows = [row("p", "none", s, 0.9) for s in range(3)]
    rows += [row("p", "representation:share=0.4", s, v) for s, v in enumerate((0.88, 0.90, 0.90))]
    rows += [row("p", "representation:share=0.8", s, v) for s, v in enumerate((0.88, 0.87, 0.90))]
    rows += [row("p", "representation:share=0.8", 0, 0.1, at=4)]  # not the last round
    found = Accuracy().verdicts(rows)
    assert [v.status for v in found] == ["reproduced", "not reproduced"]
    assert Accuracy().summary(rows)[1] == {
        "panel": "p", "rounds": 9, "defense": "representation:share=0.4", "seeds": 3,
        "accuracy": "0.893 [0.880, 0.900]", "lost": "+0.007", "last quarter": "0.893", "lost there": "+0.007",
    }  # fmt: skip
    assert Accuracy().verdicts([r for r in rows if r["defense"] != "none"]) == []


def test_what_was_lost_is_against_the_same_seeds() -> None:
    rows = [row("p", "none", s, v) for s, v in enumerate((0.9, 0.7, 0.8))]
    rows += [row("p", "pruning:share=0.8", 0, 0.88), row("p", "pruning:share=0.8", 5, 0.1)]
    rows += [row("p", "none", 0, 0.5, at=7), row("p", "pruning:share=0.8", 0, 0.4, at=7)]
    rows += [row("p", "none", 0, 0.0, at=6), row("p", "pruning:share=0.8", 0, 0.3, at=6)]  # not in the last quarter
    line = Accuracy().summary(rows)[1]
    assert (line["lost"], line["lost there"]) == ("+0.020", "+0.060")
    assert line["last quarter"] == "0.370"  # the means of (0.88, 0.4) and of 0.1
    assert paired_loss({0: 1.0}, {1: 1.0}) is None
