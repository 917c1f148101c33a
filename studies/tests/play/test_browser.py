"""The playground in a real browser: by mouse and by keyboard, wide and narrow, and nothing goes out."""

import io
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from PIL import Image

from browsing import faint, open_page
from gradveil import pace
from gradveil.types import Reconstruction
from gradveil_studies.play import servers

pytestmark = pytest.mark.filterwarnings("default")
WAIT = 120_000  # milliseconds, for whoever shares the machine
UPLOADING = "console: Method not implemented."  # Gradio's client notes it at each upload; nothing is missing
HERE = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "", None)


@pytest.fixture(scope="module")
def called() -> Iterator[list[str]]:
    """Hosts elsewhere that this process asked for."""
    hosts: list[str] = []
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def connecting(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in HERE:
            hosts.append(address[0])
        connect(self, address)

    def looking_up(host: Any, *rest: Any, **named: Any) -> Any:
        if (host.decode() if isinstance(host, bytes) else host) not in HERE:
            hosts.append(str(host))
        return look_up(host, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connecting)
        patch.setattr(socket, "getaddrinfo", looking_up)
        yield hosts


@pytest.fixture(scope="module")
def address(browser: Any, called: list[str]) -> Iterator[str]:
    pytest.importorskip("gradio", reason="the extra `play` is not installed")
    from gradveil_studies.play.page import Playground

    playground = Playground()
    playground.warm_up()
    yield playground.launch()
    playground.page.close()
    assert called == []


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, wide; whatever a test does, nothing complains and nothing is asked for from elsewhere."""
    page, trouble = open_page(browser, address, 1280, "light")
    page.set_default_timeout(WAIT)
    button(page).wait_for()
    yield page
    page.close()
    assert complaints(trouble, address) == []


def complaints(trouble: list[str], address: str) -> list[str]:
    own = (f"request: {address}", "request: blob:", UPLOADING)
    return [said for said in trouble if not said.startswith(own)]


def button(page: Any, name: str = "Rebuild it") -> Any:
    return page.get_by_role("button", name=name, exact=True)


def said(page: Any, words: str) -> None:
    page.locator(".gv-said", has_text=words).wait_for()


def shows(part: Any) -> Any:
    """What a part of the page comes to show: it may be drawn after the line that says that all is done."""
    from playwright.sync_api import expect

    expect.set_options(timeout=WAIT)
    return expect(part)


def choose(page: Any, label: str, option: str) -> None:
    page.get_by_label(label, exact=True).click()
    page.get_by_role("option", name=option).click()


def test_pictures_and_figures_come_and_move_with_the_strength(page: Any) -> None:
    button(page).click()
    said(page, "gaussian:scale=0.01: done.")
    titles = ["The client's own", "Blind guess", "Without a defence", "Oblivious server", "Adaptive server"]
    shows(page.locator(".gv-card h3")).to_have_text(titles)
    broken = "[...document.images].filter(i => !i.complete || i.naturalWidth === 0).length"
    shows(page.locator(".gv-card img")).to_have_count(5)
    page.wait_for_function(f"{broken} === 0")
    for words in ("proves nothing", "to first order", "without a defence"):
        shows(page.locator(".gv-table").first).to_contain_text(words)
    before = page.locator(".gv-card p").last.inner_text()
    page.get_by_label("range slider for Strength, weak to strong").focus()
    page.keyboard.press("ArrowRight")
    said(page, "gaussian:scale=0.03: done.")
    shows(page.locator(".gv-card p").last).not_to_have_text(before)
    shows(page.locator(".gv-table").last.locator("tbody tr")).to_have_count(2)
    page.get_by_label("range slider for Rounds that the server sees").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".gv-card h3", has_text="Multi-round server, 2 rounds").wait_for()
    said(page, "gaussian:scale=0.03: done.")
    assert faint(page) == []


def test_on_a_phone_it_fits_and_can_be_read_in_the_dark(browser: Any, address: str) -> None:
    page, trouble = open_page(browser, address, 360, "dark")
    page.set_default_timeout(WAIT)
    button(page).click()
    said(page, "done.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert faint(page) == []
    assert complaints(trouble, address) == []
    page.close()


def test_everything_is_reached_by_keyboard_and_pressed_by_it(page: Any) -> None:
    name = "e => e.labels?.[0]?.innerText.trim() || e.getAttribute('aria-label') || e.innerText.trim()"
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(f"({name})(document.activeElement)"))
        if reached[-1] == "Stop":
            break
    for wanted in ("Data", "An example of the data set", "Network", "Defence", "Strength", "Rounds", "Rebuild it"):
        assert any(wanted in one for one in reached), f"{wanted}: {reached}"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    said(page, "done.")


def test_a_long_run_can_be_stopped(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def endless(trials: Any) -> list[Reconstruction]:
        picture, steps = torch.full((1, 1, 8, 8), 0.5), 0
        while not pace.step(steps := steps + 1, 10**9):
            pace.show(lambda: picture)
            ended.wait(0.02)
        ended.set()
        return [Reconstruction(picture, None, 0.0, False)]

    monkeypatch.setattr(servers, "attempt", endless)
    button(page).click()
    page.locator(".gv-card p", has_text="at work, step").wait_for()
    button(page, "Stop").click()
    said(page, "stopped; each server shows what it had.")
    assert ended.is_set()


def test_a_picture_of_ones_own_and_files_that_are_none(page: Any) -> None:
    button(page).wait_for()
    page.get_by_label("Upload a picture").check()
    button(page).click()
    said(page, "No picture is there yet.")
    out = io.BytesIO()
    Image.linear_gradient("L").save(out, "PNG")
    files = [("notes.txt", b"no picture"), ("half.png", out.getvalue()[:100]), ("mine.png", out.getvalue())]
    for name, content in files:
        page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "", "buffer": content})
        page.get_by_label("Remove").or_(page.get_by_label("Clear")).first.wait_for()
        button(page).click()
        said(page, "done." if name == "mine.png" else "This file cannot be used as a picture.")
        if name != "mine.png":
            assert page.get_by_role("alert").count() == 1
            page.get_by_label("Remove").or_(page.get_by_label("Clear")).first.click()


def test_a_sentence_is_typed_and_comes_back_word_by_word(page: Any) -> None:
    choose(page, "Data", "Sentences: Python's manual")
    page.get_by_label("Type a sentence").check()
    page.get_by_label("Sentence", exact=True).fill("the secret is a list of names")
    choose(page, "Defence", "No defence")  # which runs it
    said(page, "none: done.")
    got = page.locator(".gv-card", has_text="Oblivious server").locator(".gv-cells .right")
    for place, word in ((-3, "list"), (-2, "of"), (-1, "names")):  # typing starts a run, too: it may be drawn again
        shows(got.nth(place)).to_have_text(word)
