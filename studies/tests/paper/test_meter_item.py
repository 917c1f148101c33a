"""The check of the leak meter: one real problem, and verdicts that follow from rows."""

from pathlib import Path

import pytest

from gradveil_studies.paper.base import Context, Row
from gradveil_studies.paper.meter import OBLIVIOUS, SETTINGS, MeterCheck, Metered, by_setting, correlations


def row(setting: str, meter: float, mse: float, image: int = 0) -> Row:
    figures = {"meter": meter, "mse": mse, "prior": 0.07, "blind": 0.06, "rank": 64, "objective": 0.0}
    return {"setting": setting, "oblivious": setting in OBLIVIOUS, "image": image, "converged": True} | figures


def test_there_are_at_least_twelve_settings_of_every_kind() -> None:
    assert len(SETTINGS) >= 12
    assert {name.split()[0] for name in SETTINGS} >= {"none", "ours", "noise", "pruning"}
    assert len(MeterCheck().units(Context(scale="full"))) == 32 * len(SETTINGS | OBLIVIOUS)
    assert len(MeterCheck().units(Context())) == len(SETTINGS | OBLIVIOUS) - 7


@pytest.mark.parametrize(
    "setting",
    ["none", "ours 40 %, tensor dropped", "every layer masked 40 %", "noise 1", "pruning 99 %, mask read", *OBLIVIOUS],
)
def test_a_setting_runs_and_noise_leaks_less(setting: str) -> None:
    item = MeterCheck(model="lenet:width=3", dataset="digits")
    (found,) = item.run(f"0 {setting}", Context(scale="full"))
    assert found["setting"] == setting
    assert 0 < found["meter"] <= found["prior"]
    assert 0 <= found["mse"] <= 1
    if setting == "none":
        assert found["mse"] < 1e-4
        assert found["meter"] < 1e-4
    if setting == "noise 1":
        assert found["meter"] > 1e-4
    if setting == "every layer masked 40 %":  # only what was sent as it is, or with a mask that shows
        assert 0.1 < found["mse"] / found["meter"] < 10
    if setting in OBLIVIOUS:  # everything leaks, and this server takes it for something else
        assert found["oblivious"]
        assert found["mse"] > 100 * found["meter"]


def test_the_verdict_follows_from_the_ranks() -> None:
    settings = list(SETTINGS)[:4]
    good = [row(s, 10.0**-i, 3 * 10.0**-i, image) for i, s in enumerate(settings) for image in (0, 1)]
    (verdict,) = MeterCheck().verdicts(good)
    assert verdict.status == "reproduced"
    assert correlations(by_setting(Metered.read(good))) == pytest.approx((1.0, 1.0))
    bad = [row(s, 10.0**-i, 10.0**i / 1e4) for i, s in enumerate(settings)]
    assert MeterCheck().verdicts(bad)[0].status == "not reproduced"
    assert MeterCheck().verdicts(good[:2]) == []
    fooled = [row(s, 1e-9, 0.3) for s in OBLIVIOUS]
    (verdict,) = MeterCheck().verdicts(good + fooled)
    assert verdict.status == "reproduced"
    assert "with the oblivious servers" in verdict.ours
    table = MeterCheck().summary(good)
    assert table[0]["attack / meter"] == "3"
    assert table[-1]["setting"] == "(mean image)"


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(s, 10.0**-i, 10.0**-i) for i, s in enumerate(SETTINGS | OBLIVIOUS)]
    assert MeterCheck().draw(rows, tmp_path / "meter")
    assert (tmp_path / "meter.svg").stat().st_size > 1000
