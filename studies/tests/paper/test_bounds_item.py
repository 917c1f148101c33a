"""The theorems beside what was attained: bounds run at toy size, verdicts follow from rows of the other items."""

import json

import pytest

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.bounds import Bounds, _second
from gradveil_studies.paper.convergence import BoundedGap
from gradveil_studies.paper.theorem2 import Bound

DEFENSE = "representation:share=0.4"


def bound(local: float = 0.1, sound: float = 0.001, blind: float = 0.06) -> Row:
    kinds = {"local": local, "global": sound, "box": sound, "reach": None, "unreachable": True}
    return {"panel": "dlg-mnist", "defense": DEFENSE, "image": 0, "blind": blind, "largest": 0.8} | kinds


def attained(server: str, mse: float, unclamped: float | None = None) -> Row:
    place = {"item": "tradeoff", "panel": "dlg-mnist", "defense": DEFENSE, "image": 0, "attack": "dlg"}
    return place | {"server": server, "mse": mse, "unclamped_mse": mse if unclamped is None else unclamped}


def status(rows: list[Row]) -> list[str]:
    return [v.status for v in Bounds().verdicts(rows)]


def test_the_sound_bounds_lie_under_the_printed_figure_and_nothing_exceeds_the_data_range() -> None:
    item = Bounds(images=2, datasets=("digits",), networks=("lenet:width=3", "lenet:width=3"))
    assert item.units(Context()) == ["dlg-digits"]
    rows = item.run("dlg-digits", Context())
    json.dumps(rows, allow_nan=False)
    assert {r["defense"] for r in rows} == {"representation:share=0.01", DEFENSE}
    for r in rows:
        assert 0 <= r["global"] <= r["box"] * (1 + 1e-9)
        if r["defense"] == DEFENSE:
            assert r["box"] < r["local"]
        else:  # a hundredth of 48 entries is none: nothing but rounding tells r′ from r
            assert max(r["box"], r["local"]) < 1e-9
        assert r["blind"] < r["largest"] <= 1
        assert r["unreachable"] == (r["reach"] is None)
    most, least = (
        {r["image"]: r["global"] for r in rows if r["defense"] == d} for d in (DEFENSE, "representation:share=0.01")
    )
    assert all(most[i] > 2 * least[i] for i in most)
    table = item.summary(rows)
    assert [line["attained, oblivious"] for line in table] == ["not measured", "not measured"]


def test_a_server_under_the_figure_breaks_it_and_the_one_above_does_not() -> None:
    rows = [bound(), attained("oblivious", 0.05, 0.5), attained("drop", 0.0001), attained("mask", 0.0003)]
    assert status(rows) == [
        "not reproduced",
        "reproduced",
        "not reproduced",
        "reproduced",
        "not reproduced",
        "not measured",
    ]
    rows = [bound(local=0.01, sound=0.07), attained("oblivious", 0.05), attained("drop", 0.02)]
    assert status(rows)[:5] == ["reproduced", "reproduced", "reproduced", "not reproduced", "reproduced"]


def test_the_knowing_server_is_the_better_of_both_and_stands_in_the_table() -> None:
    rows = [bound(), attained("oblivious", 0.3), attained("drop", 0.0001), attained("mask", 0.0003)]
    (line,) = Bounds().summary(rows)
    assert line["attained, knowing"] == "0.0001"
    assert line["attained, oblivious"] == "0.3"
    assert line["r′ unreachable"] == "100%"


def test_without_rows_nothing_is_judged() -> None:
    assert set(status([])) == {"not measured"}
    assert status([bound()])[:4] == ["not measured"] * 4
    assert Bounds().summary([]) == []


@pytest.mark.parametrize(("gap", "wanted"), [(0.1, "reproduced"), (9.0, "not reproduced")])
def test_theorem_two_is_judged_on_the_convergence_runs(gap: float, wanted: str) -> None:
    ends = [BoundedGap(found, 1.0, 5.0, Bound(1.0, 2.0)) for found in (gap, 0.1)]
    assert _second(ends).status == wanted
