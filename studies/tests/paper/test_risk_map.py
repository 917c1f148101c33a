"""The risk map: every cell is there, an audit fills one, and what is said of train mode follows from the rows."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.risk_map import NETWORKS, MapCell, RiskMap, cells, normed, scene

CELL = MapCell("resnet18", 32, "train", "fresh", 1, "step")


def test_the_map_is_whole_and_has_two_modes_where_there_is_batch_norm() -> None:
    every = cells()
    assert len({cell.name for cell in every}) == len(every) == 24 * sum(1 + normed(name) for name in NETWORKS)
    assert {name for name in NETWORKS if not normed(name)} == {"lenet", "convnext_t", "vit_s", "vit_tiny"}
    assert list(RiskMap().work(Context(scale="full"))) == [cell.name for cell in every]


@pytest.mark.parametrize("name", ["mobilenet_v3", "unet", "detector"])
def test_own_networks_take_both_sizes(name: str) -> None:
    for side in (32, 224):
        out = NETWORKS[name](side, 4).eval()(torch.zeros(1, 3, side, side))
        assert out.shape[:2] == (1, 4)
        assert out.shape[2:] == {"mobilenet_v3": (), "unet": (side, side), "detector": (side // 8, side // 8)}[name]


def rows_of(cell: MapCell, outcome: str) -> list[Row]:
    about = vars(cell) | {"accuracy": 0.1, "floor": 0.05, "took": 30.0}
    tiers = [("oblivious", outcome), ("informed", "void"), ("malicious", "not_run")]
    rows: list[Row] = [about | {"kind": "tier", "tier": tier, "outcome": got, "says": ""} for tier, got in tiers]
    line = {"tier": "oblivious", "attack": "gs:steps=50", "grade": "nothing", "void": None, "weights_of": "start"}
    return [*rows, about | {"kind": "line", "error": 0.01, "low": 0.005, "high": 0.02, "count": 2} | line]


@pytest.mark.parametrize(
    ("train", "evaluation", "status"),
    [
        ("void", "recovered", "reproduced"),
        ("recognised", "recovered", "not reproduced"),
        ("void", "void", "not measured"),  # where evaluation mode resists as well, nothing follows
    ],
)
def test_train_mode_is_judged_beside_evaluation_mode(train: str, evaluation: str, status: str) -> None:
    rows = rows_of(CELL, train) + rows_of(replace(CELL, mode="evaluation"), evaluation)
    resists, informative = RiskMap().verdicts(rows)
    assert resists.status == status
    assert informative.ours == f"{2 - [train, evaluation].count('void')} of 2"
    first, second = RiskMap().summary(rows)
    assert (first["mode"], second["mode"]) == ("train", "evaluation")
    assert first["MSE"] == "0.01 [0.005, 0.02] (gs)"
    assert first["informed server"] == "resists this budget"


@pytest.mark.slow
def test_a_cell_is_an_audit_with_dense_targets_too(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count()  # a clock that goes on by being looked at
    monkeypatch.setattr("gradveil.pace.clock", lambda: 0.002 * next(looks))
    scene.cache_clear()
    context = Context(str(data_folder))
    lenet, dense = RiskMap().work(context)
    found = RiskMap().run(lenet, context)
    outcomes = {row["tier"]: row["outcome"] for row in found if row["kind"] == "tier"}
    assert outcomes["informed"] == "identified"  # a list and planted weights: on any machine
    assert outcomes["malicious"] == "recovered"
    assert all(row["kind"] in ("tier", "line") for row in RiskMap().run(dense, context))
