"""The trade-off figure: points run end to end at toy size, no problem is solved twice, verdicts follow from rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import drop
from gradveil.metrics import Interval
from gradveil.models import build
from gradveil.threats.panel import oblivious
from gradveil.threats.trial import Trial, solved
from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.figures import Dot, dots
from gradveil_studies.paper.gs_images import GSImages
from gradveil_studies.paper.panels import (
    CONTRAST,
    FULL,
    MASK_NEWTON,
    QUICK,
    AttackPoints,
    Point,
    Shared,
    _points,
    servers,
)
from gradveil_studies.paper.rows import Measured, Trained, accuracies, cases, control_works, network_family, strongest
from gradveil_studies.paper.tradeoff import Tradeoff

TINY = Tradeoff(
    quick_images=2, quick_steps=1, datasets=("digits", "digits"), networks=("lenet:width=3", "lenet:width=3"),
    quick_gs_network="lenet:activation=relu,init=default,width=3", quick_gs_steps=4, quick_newton="newton:steps=2",
)  # fmt: skip


def row(panel: str, defense: str, server: str, mse: float, identified: float = 0.0, ssim: float | None = None) -> Row:
    place = {"panel": panel, "dataset": panel.partition("-")[2], "model": "lenet", "attack": panel.partition("-")[0]}
    figures = {"mse": mse, "unclamped_mse": 2 * mse, "normalised_mse": 16 * mse, "identified": identified}
    figures["ssim"] = (0.9 if mse < 0.06 else 0.05) if ssim is None else ssim
    return place | {"defense": defense, "server": server, "image": 0} | figures


def trained(defense: str, accuracy: float, dataset: str = "mnist", model: str = "lenet:activation=relu") -> Row:
    done = {"seed": 0, "round": 200, "rounds": 200, "accuracy": accuracy, "loss": 0.0}
    panel = f"{network_family(model)}-{dataset}"
    return {"item": "accuracy", "panel": panel, "dataset": dataset, "model": model, "defense": defense} | done


def world(oblivious_mse: float = 0.3, knowing_mse: float = 0.001, control: float = 0.001) -> list[Row]:
    panel = "dlg-mnist"
    return [
        row(panel, "(blind guess)", "mean image", 0.06, ssim=0.3),
        row(panel, "none", "oblivious", control, identified=1.0),
        row(panel, "representation:share=0.4", "oblivious", oblivious_mse),
        row(panel, "representation:share=0.4", "drop", knowing_mse, identified=float(knowing_mse < 0.06)),
        row(panel, "representation:share=0.4", "mask", knowing_mse * 2, identified=float(knowing_mse < 0.06)),
        row(panel, "random_mask:share=0.4", "oblivious", 0.2),
    ]


def test_quick_keeps_every_mechanism_and_full_covers_the_papers_ranges() -> None:
    def names(defenses: tuple[str, ...]) -> set[str]:
        return {d.partition(":")[0] for d in defenses}

    assert names(QUICK["dlg"]) == names(FULL["dlg"]) == names(QUICK["gs"]) == names(FULL["gs"])
    full = Tradeoff().units(Context(scale="full"))
    assert {u.partition("/")[0] for u in full} == {"dlg-mnist", "dlg-cifar10", "gs-cifar10"}
    assert "gs-cifar10/representation:share=0.8" in full
    assert "gs-cifar10/pruning:share=0.9" in full
    assert all(p.images == 32 for p in Tradeoff().panels(Context(scale="full")).values())


def test_every_unit_runs_and_the_result_is_drawn(tmp_path: Path) -> None:
    context = Context()
    rows = [r for unit in TINY.units(context) for r in TINY.run(unit, context)]
    json.dumps(rows)
    assert {r["panel"] for r in rows} == {"dlg-digits", "gs-digits"}
    seen = {(r["defense"].partition(":")[0], r["server"]) for r in rows if r["panel"] == "gs-digits"}
    assert seen >= {("none", "oblivious"), ("representation", "drop"), ("representation", "mask"), ("pruning", "mask")}
    assert seen >= {("gaussian", "whiten"), ("laplace", "whiten"), ("random_mask", "oblivious")}
    assert ("pruning", "simulate") not in seen
    assert ("pruning", MASK_NEWTON) not in seen
    pruned = {(r["server"], r["attack"]) for r in rows if r["panel"] == "dlg-digits" and "pruning" in r["defense"]}
    assert pruned == {("oblivious", "dlg"), ("mask", "dlg"), (MASK_NEWTON, "newton")}
    attacks = {(r["panel"], r["attack"]) for r in rows if r["server"] == "whiten"}
    assert attacks == {("dlg-digits", "newton"), ("gs-digits", "gs")}
    table = TINY.summary(rows)
    assert all(line["accuracy"] == "not measured" for line in table if line["defense"] != "(blind guess)")
    assert TINY.verdicts(rows)
    assert TINY.draw([*rows, trained("none", 0.9, "digits", "lenet")], tmp_path / "tradeoff")
    assert (tmp_path / "tradeoff.svg").stat().st_size > 1000
    assert (tmp_path / "tradeoff.png").exists()


def test_a_group_gives_what_its_units_give_alone() -> None:
    context = Context()
    units = ["gs-digits/none", "gs-digits/representation:share=0.4"]
    alone = {unit: TINY.run(unit, context) for unit in units}
    _points.cache_clear()  # so that nothing is remembered
    grouped = TINY.run_group(units, context)
    assert list(grouped) == units
    for unit in units:
        assert [r["server"] for r in grouped[unit]] == [r["server"] for r in alone[unit]]
        for a, b in zip(grouped[unit], alone[unit], strict=True):
            assert a["mse"] == pytest.approx(b["mse"], rel=0.02)


def test_points_together_are_the_rows_of_the_plain_way() -> None:
    context = Context()
    points = AttackPoints.of("digits", "lenet:width=3", "dlg:steps=1,restarts=1", 2, context)
    spec = "representation:share=0.4"
    known = servers(spec, points.scene.model, "newton")
    fast = points.rows([Point(spec, s) for s in known])
    seen = list(enumerate(points.scene.observe(spec)))
    slow = [
        (server, i, Trial(s, server, server.attack or points.attack, points.scene.seeds("attack", server.name, i)))
        for server in known
        for i, s in seen
    ]
    for a, (server, i, trial) in zip(fast, slow, strict=True):
        assert (a["server"], a["image"]) == (server.name, i)
        alone = points.scene.row(i, *solved([trial]))
        assert a["mse"] == pytest.approx(alone["mse"], rel=1e-2)  # weights of 1 are multiplied in where problems stack


def test_what_a_server_sees_twice_is_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    points = AttackPoints.of("digits", "lenet:width=3", "dlg:steps=1,restarts=1", 2, Context())
    kind = type(build_attack("dlg"))
    sizes: list[int] = []
    plain = kind.reconstruct_many
    monkeypatch.setattr(kind, "reconstruct_many", lambda s, v, r: sizes.append(len(v)) or plain(s, v, r))
    layer = drop("fc.weight")
    rows = points.rows([Point(f"representation:share={s}", layer) for s in (0.1, 0.4)])
    assert sizes == [2]
    assert [r["mse"] for r in rows[:2]] == [r["mse"] for r in rows[2:]]
    points.rows([Point(f"representation:share={s}", oblivious()) for s in (0.1, 0.4)])
    assert sizes == [2, 4]
    points.rows([Point("representation:share=0.4", s) for s in (oblivious(), layer)])  # both known by now
    assert sizes == [2, 4]


def test_the_unclamped_error_is_of_what_the_search_left() -> None:
    points = AttackPoints.of("digits", "lenet:width=3", "dlg:steps=2,restarts=1,start=normal", 2, Context())
    rows = points.rows([Point("none", oblivious())], pictures=1)
    assert all(r["unclamped_mse"] > r["mse"] for r in rows)
    assert [("picture" in r) for r in rows] == [True, False]
    assert isinstance(points.scene, Shared)
    std = points.scene.public.batch.inputs.std()
    assert rows[0]["normalised_mse"] == pytest.approx(rows[0]["mse"] / float(std) ** 2, rel=1e-3)


def final(rows: list[Row], dataset: str, model: str, defense: str) -> dict[int, float]:
    return accuracies(Trained.read(rows, "accuracy"), dataset, model, defense)


def test_accuracies_are_joined_by_data_family_and_defence() -> None:
    rows = [trained("none", 0.9), trained("gaussian:scale=1e-3", 0.8), trained("none", 0.5, model="convnet_authors")]
    assert list(final(rows, "mnist", "lenet", "gaussian:scale=0.001").values()) == [0.8]
    assert list(final(rows, "mnist", "convnet", "none").values()) == [0.5]
    other = [trained("none", 0.3) | {"panel": "lenet-mnist-default"}]
    assert not final(other, "mnist", "lenet", "none")
    assert final([*other, trained("none", 0.9) | {"panel": "lenet-mnist"}], "mnist", "lenet", "none") == {0: 0.9}
    assert list(final(rows, "cifar10", "lenet", "none").values()) == []
    early = trained("none", 0.2) | {"round": 100}
    assert final([*rows, early], "mnist", "lenet", "none") == {0: 0.9}
    moment = [trained("representation:share=0.8,method=moment", 0.7)]
    assert list(final(moment, "mnist", "lenet", "representation:share=0.8").values()) == [0.7]
    assert list(final(moment, "mnist", "lenet", "representation:share=0.4").values()) == []
    assert (
        list(final([trained("gaussian:scale=0.1,on=weights", 0.2)], "mnist", "lenet", "gaussian:scale=0.1").values())
        == []
    )
    unfinished = [trained("none", 0.1) | {"round": 10}, {k: v for k, v in rows[0].items() if k != "model"}]
    assert list(final(unfinished, "mnist", "lenet", "none").values()) == [0.9]


def test_the_papers_unit_is_unclamped_for_dlg_and_normalised_for_gs() -> None:
    assert Measured.of(row("dlg-mnist", "none", "oblivious", 0.1)).papers_mse == pytest.approx(0.2)
    assert Measured.of(row("gs-mnist", "none", "oblivious", 0.1)).papers_mse == pytest.approx(1.6)
    kept = {k: v for k, v in row("dlg-mnist", "none", "whiten", 0.1).items() if k != "unclamped_mse"}
    assert Measured.of(kept).papers_mse == pytest.approx(0.1)


def test_a_setting_without_accuracy_is_listed_and_not_dropped() -> None:
    table = Tradeoff().summary([*world(), trained("none", 0.9), trained("representation:share=0.4", 0.85)])
    by = {(line["defense"], line["server"]): line for line in table}
    assert by["representation:share=0.4", "oblivious"]["lost"] == "+0.050"
    assert by["random_mask:share=0.4", "oblivious"]["accuracy"] == "not measured"
    assert by["(blind guess)", "mean image"]["mse"].startswith("0.0600")


def test_verdicts_tell_naive_and_knowing_servers_apart() -> None:
    status = {v.claim: v.status for v in Tradeoff().verdicts(world())}
    assert status["dlg-mnist: the attack recovers undefended images (control)"] == "reproduced"
    assert [s for c, s in status.items() if "does not know" in c] == ["reproduced"]
    assert [s for c, s in status.items() if "a server that knows" in c] == ["not reproduced"]
    assert [s for c, s in status.items() if "score matters" in c] == ["reproduced"]
    status = {v.claim: v.status for v in Tradeoff().verdicts(world(0.03, 0.3))}
    assert [s for c, s in status.items() if "does not know" in c] == ["not reproduced"]
    assert [s for c, s in status.items() if "a server that knows" in c] == ["reproduced"]
    assert [s for c, s in status.items() if "score matters" in c] == ["not reproduced"]


@pytest.mark.parametrize(
    ("ssim", "identified", "status"),
    [(0.05, 0.0, "reproduced"), (0.8, 0.0, "not reproduced"), (0.05, 1.0, "reproduced only to the eye")],
)
def test_a_hidden_image_has_neither_the_look_nor_the_traces(ssim: float, identified: float, status: str) -> None:
    ours = [row("dlg-mnist", "representation:share=0.4", "oblivious", 0.3, identified, ssim)]
    rows = [r for r in world() if (r["defense"], r["server"]) != ("representation:share=0.4", "oblivious")] + ours
    (verdict,) = [v for v in Tradeoff().verdicts(rows) if "does not know" in v.claim]
    assert verdict.status.partition(" (")[0] == status


def test_a_failing_control_voids_its_panel() -> None:
    rows = world(control=0.05)
    assert control_works(cases(Measured.read(rows)), "dlg-mnist") is False
    verdicts = Tradeoff().verdicts(rows)
    assert verdicts[0].status == "not reproduced"
    assert {v.status for v in verdicts[1:]} == {"not measured"}
    assert all(line["control"] == "void" for line in Tradeoff().summary(rows) if line["defense"] != "(blind guess)")


def test_the_knowing_server_takes_the_better_of_its_ways() -> None:
    found = strongest(cases(Measured.read(world())), "knowing")
    assert {s.defense: s.server for s in found} == {"none": "oblivious", "representation:share=0.4": "drop"}


def test_cuda_groups_hold_every_unit_once() -> None:
    item, context = Tradeoff(), Context(device=torch.device("meta"), scale="full")
    units = item.units(context)
    groups = item.groups(units, context)
    assert sorted(u for g in groups for u in g) == sorted(units)
    assert all(len({u.partition("/")[0] for u in g}) == 1 for g in groups)
    assert len(groups) < len(units)
    assert all(len(g) == 1 for g in item.groups(units, Context()))


@pytest.mark.parametrize("scale", ["quick", "full"])
def test_the_gs_server_that_knows_of_noise_runs_the_same_attack_with_the_smoothness_that_it_asks_for(
    scale: Any,
) -> None:
    panel = Tradeoff().panels(Context(scale=scale))["gs-cifar10"]
    assert build_attack(panel.against_noise) == replace(build_attack(panel.attack), contrast=CONTRAST)


def test_both_gs_items_attack_one_network_on_normalised_inputs() -> None:
    full = Context(scale="full")
    panel, images = Tradeoff().panels(full)["gs-cifar10"], GSImages().panel(full)
    assert (panel.model, panel.attack, panel.images) == (images.model, images.attack, images.images)
    network = build(panel.model, (3, 32, 32), 10, seed=0)
    assert network.normalize.mean.flatten().tolist() == pytest.approx([0.4914, 0.4822, 0.4465])


def test_a_dot_has_its_range_beside_it() -> None:
    axis = pytest.importorskip("matplotlib.figure").Figure().subplots()
    dots(axis, [Dot("a", Interval(1.0, 0.5, 3.0, 1)), Dot.of("b", [2.0, 4.0])], "x")
    reach = [container[2][0].get_segments()[0][:, 0].tolist() for container in axis.containers]
    assert reach == [[0.5, 3.0], [2.0, 4.0]]
    assert [container[0].get_xdata()[0] for container in axis.containers] == [1.0, 3.0]


@pytest.mark.parametrize(("high", "labels"), [(0.06, ["0.003", "0.01", "0.03"]), (100.0, None)])
def test_labels_of_a_logarithmic_axis_keep_apart(high: float, labels: list[str] | None) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axis = figure.subplots()
    dots(axis, [Dot.of("a", [0.003]), Dot.of("b", [high])], "x", log=True)
    figure.canvas.draw()
    low, top = axis.get_xlim()
    shown = [t.get_text() for t in axis.get_xticklabels() if low <= t.get_position()[0] <= top]
    assert shown == labels if labels else len(shown) >= 3
    assert not any(t.get_text() for t in axis.get_xticklabels(minor=True))
