import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from gradveil.metrics import Interval, chance_of, interval, rate, short


def test_the_bootstrap_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = interval(list(rng.normal(size=40)), draws=300)
        covered += found.low <= 0.0 <= found.high
    assert 0.88 <= covered / 200 <= 0.99


def test_the_interval_narrows_with_more_images() -> None:
    rng = np.random.default_rng(0)
    few, many = interval(list(rng.normal(size=10))), interval(list(rng.normal(size=1000)))
    assert many.high - many.low < 0.3 * (few.high - few.low)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_the_same_values_give_the_same_interval_around_the_mean(values: list[float]) -> None:
    first = interval(values, draws=100)
    assert first == interval(values, draws=100)
    assert min(values) - 1e-6 <= first.low <= first.high <= max(values) + 1e-6
    assert first.mean == pytest.approx(np.mean(values))


def test_the_global_random_state_is_untouched() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    interval([1.0, 2.0, 3.0])
    assert (np.random.get_state()[1] == before).all()


def test_eight_misses_do_not_prove_a_rate_of_zero() -> None:
    found = rate([0.0] * 8)
    assert found.mean == 0.0
    assert found.low == pytest.approx(0.0, abs=1e-12)
    assert found.high == pytest.approx(0.3244, abs=1e-3)  # Wilson: z² / (n + z²)


def test_values_that_are_not_numbers_are_left_out() -> None:
    assert interval([1.0, math.nan, 3.0]).count == 2
    assert rate([1.0, math.nan]).mean == 1.0
    assert math.isnan(interval([math.nan]).mean)
    assert rate([]).count == 0


@given(st.integers(1, 40), st.data())
def test_rates_and_chances_are_those_of_scipy(count: int, data: st.DataObject) -> None:
    hits = data.draw(st.integers(0, count))
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    found = rate([1.0] * hits + [0.0] * (count - hits))
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
    by_chance = stats.binomtest(hits, count, 0.01, alternative="greater").pvalue
    assert chance_of(hits, count, 0.01) == pytest.approx(by_chance, rel=1e-6, abs=1e-12)


def test_numbers_are_short() -> None:
    assert [short(x) for x in (9.6e-9, 0.25, 1e-4, 12345.0)] == ["9.6e-9", "0.25", "0.0001", "1.2e+4"]


def test_an_interval_writes_itself() -> None:
    assert str(Interval(0.00123, 9.6e-9, 0.0014, 8)) == "0.0012 [9.6e-9, 0.0014]"
    assert f"{Interval(0.00123, 0.0011, 0.0014, 8):.4f}" == "0.0012 [0.0011, 0.0014]"
    assert f"{Interval(0.375, 0.14, 0.69, 8):.0%}" == "38% [14%, 69%]"
    assert Interval(0.375, 0.14, 0.69, 8).as_count == "3/8 [14%, 69%]"
    assert f"{interval([]):.4f}" == str(interval([])) == rate([]).as_count == "–"
