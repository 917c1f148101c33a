"""The page in a real browser: it draws, complains of nothing, and fits a phone in light and dark."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradveil.report.page import write_report

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(run_folder: Path) -> str:
    return write_report(run_folder).resolve().as_uri()


def open_page(browser: Any, address: str, width: int, scheme: str) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: trouble.append(f"error: {error}"))
    page.on("request", lambda r: None if r.url.startswith(("data:", "file:")) else trouble.append(f"request: {r.url}"))
    page.goto(address)
    return page, trouble


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


def contrast(a: list[float], b: list[float]) -> float:
    """The contrast ratio of WCAG 2 between two colours in 0..255."""

    def luminance(rgb: list[float]) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def rgb(text: str) -> list[float]:
    return [float(part) for part in text.strip("rgba()").split(",")[:3]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground_in_light_and_dark(browser: Any, address: str, scheme: str) -> None:
    page, _ = open_page(browser, address, 360, scheme)
    colour = "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    body = page.eval_on_selector("body", colour)
    assert (sum(rgb(body[1])) > 600) == (scheme == "light")
    assert contrast(rgb(body[0]), rgb(body[1])) > 7
    for badge in page.locator(".badge").all():
        ink, ground = badge.evaluate(colour)
        assert contrast(rgb(ink), rgb(ground)) > 4.5
    soft = page.eval_on_selector("figcaption", colour)[0]
    assert contrast(rgb(soft), rgb(body[1])) > 4.5
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
