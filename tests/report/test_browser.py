"""The page in a real browser: it draws, complains of nothing, and fits a phone in light and dark."""

from pathlib import Path
from typing import Any

import pytest

from browsing import contrast, faint, open_page, rgb
from gradveil.report.page import write_report

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def address(run_folder: Path) -> str:
    return write_report(run_folder).resolve().as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_opens_without_complaint_and_fits(browser: Any, address: str, width: int, scheme: str) -> None:
    page, trouble = open_page(browser, address, width, scheme)
    assert trouble == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).length"
    assert page.evaluate("document.images.length") > 200
    assert page.evaluate(broken) == 0
    assert page.locator("article.card").count() == 5
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_light_and_dark(browser: Any, address: str, scheme: str) -> None:
    page, _ = open_page(browser, address, 360, scheme)
    colour = "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    body = page.eval_on_selector("body", colour)
    assert (sum(rgb(body[1])) > 600) == (scheme == "light")
    assert contrast(rgb(body[0]), rgb(body[1])) > 7
    assert faint(page) == []
    page.close()


def test_on_a_phone_text_is_readable_and_the_table_scrolls_by_itself(browser: Any, address: str) -> None:
    page, _ = open_page(browser, address, 360, "light")
    assert page.eval_on_selector("p", "e => parseFloat(getComputedStyle(e).fontSize)") >= 15
    smallest = page.eval_on_selector_all(
        "svg text", "all => Math.min(...all.map(t => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9
    table = "#table .scroll"
    assert page.eval_on_selector(table, "e => e.scrollWidth > e.clientWidth")
    page.close()
