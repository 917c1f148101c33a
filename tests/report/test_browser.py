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


def test_a_picture_opens_large_beside_its_original_and_the_keyboard_is_enough(browser: Any, address: str) -> None:
    page, trouble = open_page(browser, address, 1280, "light")
    stops = page.eval_on_selector_all(".shots", "all => all.map(s => s.querySelectorAll('[tabindex=\"0\"]').length)")
    assert set(stops) == {1}  # one stop for each strip: arrows move within it
    page.locator("#pictures .strip:nth-of-type(4) img").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('large').open")
    under, over = page.eval_on_selector_all("#large .stage img", "both => both.map(i => i.src)")
    mine = page.evaluate("[shown.src, document.querySelector('img[data-original=\"1\"]').src]")
    assert [over, under] == mine
    clipped = "document.querySelector('#large .stage img:last-child').style.clipPath"
    before = page.evaluate(clipped)
    page.locator("#large input").focus()
    page.keyboard.press("End")
    assert page.evaluate(clipped) != before
    assert page.evaluate(clipped).endswith("0%)")
    page.get_by_role("button", name="next").click()
    assert page.evaluate("shown.dataset.example") == "2"
    page.keyboard.press("Escape")
    assert not page.evaluate("document.getElementById('large').open")
    page.wait_for_function("document.activeElement === shown")  # the event of closing comes a little later
    assert trouble == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_figure_answers_to_mouse_and_keyboard(browser: Any, address: str, scheme: str) -> None:
    page, _ = open_page(browser, address, 360, scheme)
    mark = page.locator("figure.chart svg [data-series='1'][aria-label]").first
    mark.focus()
    assert "MSE" in page.locator("#tip").inner_text()
    assert "[" in page.locator("#tip").inner_text()  # with its interval
    assert faint(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()
    figure = page.locator("figure.chart svg").nth(1)
    figure.locator("[data-legend='1']").focus()
    page.keyboard.press("Enter")
    assert figure.locator("[data-series='2'].off").count() > 0
    assert figure.locator("[data-series='1'].off").count() == 0
    page.keyboard.press("Enter")
    assert figure.locator(".off").count() == 0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_spec_shows_where_its_plain_name_has_the_focus(browser: Any, address: str, scheme: str) -> None:
    page, _ = open_page(browser, address, 360, scheme)
    name = page.locator(".card .named", has_text="Gaussian noise, std 0.1")
    spec = name.locator(".spec")
    assert spec.evaluate("e => getComputedStyle(e).visibility") == "hidden"
    name.focus()
    assert spec.evaluate("e => getComputedStyle(e).visibility") == "visible"
    assert spec.inner_text() == "gaussian:std=0.1"
    assert faint(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.close()


def test_without_scripts_everything_is_still_said(browser: Any, address: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    for text in ("What to do", "Against whom", "Images recovered", "Privacy against accuracy"):
        assert page.get_by_text(text).first.is_visible()
    assert not page.locator("#large").is_visible()
    assert page.locator("figure.chart svg title").count() > 10
    context.close()


def test_the_printed_page_says_the_spec_and_leaves_buttons_out(browser: Any, address: str) -> None:
    page, _ = open_page(browser, address, 800, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator(".card .named .spec").first.is_visible()
    assert not page.locator("nav").is_visible()
    assert page.eval_on_selector("body", "e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert faint(page) == []
    pdf = page.pdf(prefer_css_page_size=True)
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") < 30
    page.close()
