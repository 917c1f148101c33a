import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gradveil.report.page import linear_scale, log_scale, number
from gradveil.report.pictures import picture


def decode(src: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))))


def test_grey_and_colour_pictures_come_back_pixel_by_pixel() -> None:
    rng = np.random.default_rng(0)
    for channels in (1, 3):
        x = rng.integers(0, 256, (channels, 5, 7)) / 255
        back = decode(picture(x))
        back = back[None] if channels == 1 else np.moveaxis(back, -1, 0)
        assert np.array_equal(back, np.rint(x * 255))


def test_a_vector_is_drawn_too_and_values_out_of_range_are_clipped() -> None:
    assert decode(picture(np.array([0.0, 2.0, -1.0, np.nan, 1.0]))).flatten().tolist() == [0, 255, 0, 128, 255, 0]


@given(st.lists(st.floats(1e-9, 1.0), min_size=1, max_size=6))
def test_a_log_scale_keeps_order_and_range(values: list[float]) -> None:
    scale = log_scale(values, 10.0, 300.0)
    places = [scale(v) for v in sorted(values)]
    assert places == sorted(places)
    assert all(10.0 <= p <= 300.0 for p in places)
    assert len(scale.ticks()) >= 1
    assert all(scale.low * 0.99 <= t <= scale.high * 1.01 for t in scale.ticks())


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_a_linear_scale_holds_its_values_and_has_ticks(values: list[float]) -> None:
    scale = linear_scale(values, 0.0, 100.0)
    assert all(scale.low - 1e-9 <= v <= scale.high + 1e-9 for v in values)
    assert 2 <= len(scale.ticks()) <= 12


def test_a_value_of_zero_lies_at_the_end_of_a_log_axis() -> None:
    assert log_scale([0.0, 0.1], 0.0, 100.0)(0.0) == 0.0


@pytest.mark.parametrize(("value", "text"), [(1e-5, "10⁻⁵"), (0.1, "0.1"), (2e-7, "2·10⁻⁷"), (0.0, "0")])
def test_ticks_read_well(value: float, text: str) -> None:
    assert number(value) == text
