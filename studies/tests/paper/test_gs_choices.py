"""GS under its open choices: each changes what it names, runs end to end at toy size, and verdicts follow from rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradveil.attacks.base import build as build_attack
from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.gs_images import CHOICES, GC, OURS, GSChoices

NETWORK = "lenet:activation=relu,init=default,width=3"
TINY = GSChoices(dataset="digits", quick_images=2, quick_steps=4, quick_networks=(f"{NETWORK},normalize=half", NETWORK))


def row(choice: str, defense: str, server: str, mse: float) -> Row:
    ssim = 0.3 if defense.startswith("(") else 0.9 if mse < 0.06 else 0.05
    place = {"panel": choice, "dataset": "cifar10", "model": "convnet", "attack": "gs", "image": 0}
    figures = {"mse": mse, "normalised_mse": 16 * mse, "objective": 0.1, "identified": 0.0, "ssim": ssim}
    return place | {"defense": defense, "server": server} | figures


def world(choice: str, ours: float = 0.2, knowing: float = 0.001, control: float = 0.001) -> list[Row]:
    return [
        row(choice, "(blind guess)", "mean image", 0.06),
        row(choice, "none", "oblivious", control),
        row(choice, OURS, "oblivious", ours),
        row(choice, OURS, "mask", knowing),
        row(choice, GC, "oblivious", 0.02),
    ]


def test_a_choice_changes_what_it_names_and_nothing_else() -> None:
    item = GSChoices()
    for device, tf32 in (("cpu", False), ("cuda", True)):
        context = Context(scale="full", device=torch.device(device))
        panels = {name: item.panel(name, context) for name in CHOICES}
        usual = panels["as in the figures"]
        attacks = {name: build_attack(panel.attack) for name, panel in panels.items()}
        first = attacks["as in the figures"]
        assert first == build_attack(f"gs:steps=500,lr=0.1,tv=0.0001,tf32={str(tf32).lower()}")
        changed = {
            "as in the figures": {},
            "120 iterations": {"steps": 120},
            "1000 iterations": {"steps": 1000},
            "central start": {"start": "central"},
            "step 0.025": {"lr": 0.025},
            "smoothness 4e-4": {"tv": 4e-4},
            "normalised units": {"steps": 1000, "start": "central", "lr": 0.025, "tv": 4e-4},
            "smoothness 0.01": {"tv": 0.01},
            "raw inputs": {},
            "other weights": {},
            "third weights": {},
        }
        assert attacks == {name: replace(first, **what) for name, what in changed.items()}  # type: ignore[type-var]
        assert {n for n, p in panels.items() if p.model != usual.model} == {"raw inputs"}
        assert {n: p.weights for n, p in panels.items() if p.weights} == {"other weights": 1, "third weights": 2}
        assert {p.images for p in panels.values()} == {32}


def test_another_draw_of_weights_keeps_the_images() -> None:
    points = [TINY.panel(name, Context()).points(Context()) for name in ("as in the figures", "other weights")]
    first, other = (p.scene for p in points)
    assert torch.equal(first.truth.inputs, other.truth.inputs)
    assert not torch.equal(first.model.get_parameter("fc.weight"), other.model.get_parameter("fc.weight"))


def test_every_choice_runs_and_the_result_is_drawn(tmp_path: Path) -> None:
    context = Context()
    rows = [r for unit in TINY.units(context) for r in TINY.run(unit, context)]
    json.dumps(rows)
    assert list(dict.fromkeys(r["panel"] for r in rows)) == list(CHOICES)
    for name in CHOICES:
        seen = {(r["defense"].partition(":")[0], r["server"]) for r in rows if r["panel"] == name}
        assert seen >= {("none", "oblivious"), ("representation", "oblivious"), ("representation", "mask")}
        assert seen >= {("pruning", "oblivious"), ("pruning", "mask"), ("(blind guess)", "mean image")}
    assert {r["model"] for r in rows if r["panel"] == "raw inputs"} == {NETWORK}
    table = TINY.summary(rows)
    assert len(table) == 5 * len(CHOICES)
    assert TINY.draw(rows, tmp_path / "gs-choices")
    assert (tmp_path / "gs-choices.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("ours", "knowing", "status"),
    [
        (0.2, 0.001, ["reproduced", "reproduced", "reproduced"]),
        (0.02, 0.001, ["reproduced", "reproduced only under: as in the figures", "reproduced"]),
        (0.2, 0.3, ["reproduced", "reproduced", "reproduced only under: as in the figures"]),
    ],
)
def test_the_verdict_names_the_choices_that_it_holds_under(ours: float, knowing: float, status: list[str]) -> None:
    rows = world("as in the figures") + world("smoothness 0.01", ours, knowing)
    assert [v.status for v in GSChoices().verdicts(rows)] == status


def test_a_choice_whose_control_fails_is_not_judged() -> None:
    rows = world("as in the figures") + world("raw inputs", ours=0.001, knowing=0.3, control=0.02)
    verdicts = GSChoices().verdicts(rows)
    assert [v.status for v in verdicts] == ["reproduced only under: as in the figures", "reproduced", "reproduced"]
    assert "raw inputs" not in verdicts[1].ours
    void = GSChoices().verdicts(world("raw inputs", control=0.02))
    assert [v.status for v in void] == ["not reproduced", "not measured", "not measured"]
    assert [v.status for v in GSChoices().verdicts([])] == ["not measured"] * 3


def test_the_table_holds_the_mean_of_both_units_and_of_the_objective() -> None:
    rows = world("as in the figures")
    rows += [
        r | {"image": 1, "mse": 0.4, "normalised_mse": 8.0, "objective": 0.3} for r in rows if r["defense"] == OURS
    ]
    (line,) = [r for r in GSChoices().summary(rows) if (r["defense"], r["server"]) == (OURS, "oblivious")]
    assert line["mse"].startswith("0.3000")
    assert (line["normalised, mean"], line["objective"]) == ("5.600", "0.2000")
    assert (line["images"], line["mean image"]) == (2, "0.0600")
