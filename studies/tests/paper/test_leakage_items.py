"""The reproduction items on leakage run end to end at toy size, and their verdicts follow from their rows."""

from pathlib import Path

import pytest

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.table1 import Table1
from gradveil_studies.paper.wg_clg_rep import WgClgRep


def test_table1_runs_a_setting_and_gives_every_control(data_folder: Path) -> None:
    item = Table1(rounds=20)
    rows = item.run("E=1, B=32/0", Context(str(data_folder)))
    layers = {r["layer"]: r for r in rows}
    assert list(layers) == ["conv1", "conv2", "fc1", "fc2", "fc3", "classes"]
    assert layers["fc3"]["own"] > 0.9
    assert layers["fc1"]["own"] - layers["fc1"]["wrong"] < 0.02  # shared by all classes, not the class's own
    assert layers["classes"]["bias_sign"] >= 0.97
    line = next(r for r in item.summary(rows) if r["layer"] == "fc1")
    assert line["paper"] == 0.98
    assert {"own", "wrong", "nearest", "centred", "blind"} <= line.keys()


def test_the_iid_setting_deals_every_class_to_every_device(data_folder: Path) -> None:
    rows = Table1(rounds=10).run("E=1, B=32 (IID)/0", Context(str(data_folder)))
    assert next(r for r in rows if r["layer"] == "classes")["bias_sign"] < 1.0


def test_table1_units_are_the_papers_rows_for_each_seed() -> None:
    assert len(Table1().units(Context(scale="full"))) == 18
    assert len(Table1().units(Context())) == 6


def scores(own: float, nearest: float) -> list[Row]:
    shared = {"setting": "E=1, B=32", "seed": 0, "wrong": own, "nearest": nearest, "centred": 0.0, "blind": own}
    sets = {"setting": "E=1, B=32", "layer": "classes", "bias_sign": 0.98, "row_sum": 0.5}
    return [shared | {"layer": layer, "own": own} for layer in ("fc1", "fc2", "fc3")] + [sets]


@pytest.mark.parametrize(("nearest", "status"), [(0.5, "not reproduced"), (0.95, "reproduced")])
def test_a_high_correlation_is_not_taken_for_a_class(nearest: float, status: str) -> None:
    verdicts = Table1().verdicts(scores(0.98, nearest))
    assert [v.status for v in verdicts if "near 0.9" in v.claim] == ["reproduced"] * 3
    assert [v.status for v in verdicts if "tells its class" in v.claim] == [status] * 3
    assert verdicts[-1].status == "reproduced"  # the class set


@pytest.mark.slow
def test_the_figure_runs_every_part_and_is_drawn(data_folder: Path, tmp_path: Path) -> None:
    item, context = WgClgRep(steps=1, restarts=1, images=4), Context(str(data_folder))
    units = item.units(context)
    assert len(units) == 10
    rows = [row for unit in units[:4] for row in item.run(unit, context)]
    assert {(r["network"], r["part"]) for r in rows} >= {("probe", "WG"), ("probe", "CLG"), ("probe", "Rep")}
    seen = {r["part"]: r["known"] for r in rows if r["network"] == "probe"}
    assert seen["CLG"] == 912  # equations for 3072 unknowns
    assert seen["WG"] == seen["CLG"] + seen["Rep"]
    assert item.draw(rows, tmp_path / "figure")
    assert (tmp_path / "figure.svg").stat().st_size > 0


@pytest.mark.parametrize(("fc1", "status"), [(0.84, "reproduced"), (0.97, "not reproduced")])
def test_other_settings_are_judged_at_all_layers_together(fc1: float, status: str) -> None:
    own = {"fc1": fc1, "fc2": 0.9, "fc3": 0.92}
    rows = [{"setting": "E=5, B=32", "layer": layer, "own": value} for layer, value in own.items()]
    (verdict,) = Table1().verdicts(rows)
    assert verdict.status == status
    assert verdict.ours == f"{fc1:.3f} / 0.900 / 0.920"
    assert [v.status for v in Table1().verdicts(rows[:2])] == ["not reproduced"]  # a layer is missing


def images(network: str, part: str, *mse: float) -> list[Row]:
    return [{"network": network, "part": part, "mse": value} for value in mse]


@pytest.mark.parametrize(("clg", "status"), [(0.2, "reproduced"), (0.001, "not reproduced")])
def test_convolutions_are_judged_by_what_they_recover(clg: float, status: str) -> None:
    rows = images("probe", "WG", 0.001, 0.2) + images("probe", "CLG", clg, 0.2) + images("probe", "Rep", 0.002, 0.002)
    convolutions, representation = WgClgRep().verdicts(rows)
    assert convolutions.status == status
    assert representation.status == "reproduced"


def test_a_figure_whose_control_fails_says_nothing() -> None:
    rows = images("probe", "WG", 0.2, 0.2) + images("probe", "CLG", 0.2, 0.2) + images("probe", "Rep", 0.1, 0.1)
    assert [v.status for v in WgClgRep().verdicts(rows)] == ["not measured", "not measured"]


@pytest.mark.parametrize(
    ("rep", "whole", "blind", "status"),
    [
        (0.008, 0.001, 0.09, "reproduced"),  # both are recovered, if not equally well
        (0.08, 0.001, 0.09, "not reproduced"),  # the whole gradient recovers what Rep does not
        (0.008, 0.2, 0.007, "not reproduced"),  # a guess does as well
        (0.008, 0.2, 0.09, "reproduced"),
        (0.08, 0.2, 0.09, "not measured"),  # no control: neither recovers an image
    ],
)
def test_the_representation_must_match_the_whole_gradient_and_beat_a_guess(
    rep: float, whole: float, blind: float, status: str
) -> None:
    rows = images("probe", "WG", whole) + images("probe", "CLG", 0.2) + images("probe", "Rep", rep)
    rows += images("(blind guess)", "grey", blind) + images("(blind guess)", "noise", 0.3)
    assert WgClgRep().verdicts(rows)[1].status == status


def test_the_summary_gives_the_range_over_seeds() -> None:
    rows = [r for own in (0.9, 0.96) for r in scores(own, 1.0) if r["layer"] == "fc1"]
    assert Table1().summary(rows)[0]["own"] == "0.930 [0.900, 0.960]"


@pytest.mark.slow
def test_stacked_clients_give_the_same_table(data_folder: Path) -> None:
    one, other = (
        Table1(rounds=30, engine=engine).run("E=1, B=16/0", Context(str(data_folder)))
        for engine in ("sequential", "vectorised")
    )
    for a, b in zip(one, other, strict=True):
        assert a == {key: pytest.approx(value, abs=1e-3) if isinstance(value, float) else value
                     for key, value in b.items()}  # fmt: skip
