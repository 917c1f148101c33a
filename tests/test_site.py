"""The documentation site: built strictly, and opened from disk in a real browser."""

import html
import json
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import gradveil
from browsing import contrast, faint, open_page, rgb

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import build_site  # noqa: E402


def complaints(trouble: list[str]) -> list[str]:
    """Leave out the browser's notice that it did not move the focus to the search of a page opened at a section."""
    return [one for one in trouble if "Autofocus processing was blocked" not in one]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="the extra `site` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "tools" / "build_site.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists(), page


def test_the_interface_page_has_every_public_name(site: Path) -> None:
    named = re.findall(r"^::: gradveil\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(set(gradveil.__all__) - {"__version__"})
    text = (site / "api.html").read_text()
    assert all(f'id="gradveil.{name}"' in text or f">{name}<" in text for name in named)


def test_every_link_and_picture_of_the_built_pages_is_there(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}  # that is for a server
    ids = {page: set(re.findall(r'\sid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for target in re.findall(r'(?:href|src)="(?!https?:|data:|mailto:)([^"]+)"', text):
            name, _, anchor = unquote(html.unescape(target)).partition("#")
            at = (page.parent / name).resolve() if name else page
            if not at.exists() or (anchor and at in ids and anchor not in ids[at]):
                broken.append(f"{page.relative_to(site)} -> {target}")
    assert not broken


def test_every_page_opens_from_disk_without_a_complaint_and_fits_a_phone(browser: Any, site: Path) -> None:
    first, *rest = (page for page in sorted(site.rglob("*.html")) if page.name != "404.html")
    opened, trouble = open_page(browser, first.as_uri(), 360, "light")
    wide = {}
    for page in (first, *rest):
        opened.goto(page.as_uri())
        wide[page.name] = opened.evaluate("document.documentElement.scrollWidth")
    opened.close()
    assert complaints(trouble) == []
    assert {name: width for name, width in wide.items() if width > 360} == {}


@pytest.mark.parametrize(
    ("page", "width", "scheme"),
    [
        *product(["index", "theory/paper"], [360, 1280], ["light", "dark"]),
        *product(["api", "how-to/audit-my-model", "results/leaderboard", "compatibility"], [1280], ["light", "dark"]),
    ],
)
def test_a_page_opens_from_disk_fits_and_can_be_read(
    browser: Any, site: Path, page: str, width: int, scheme: str
) -> None:
    opened, trouble = open_page(browser, (site / f"{page}.html").as_uri(), width, scheme)
    assert complaints(trouble) == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert faint(opened) == []
    opened.close()


VISIBLE = """() => [...document.querySelectorAll('.filtered tbody tr')].filter(row => row.checkVisibility())
  .map(row => [...row.cells].map(cell => cell.textContent.trim()))"""


def test_tables_made_from_data_are_filtered_in_the_browser(browser: Any, site: Path) -> None:
    page, trouble = open_page(browser, (site / "compatibility.html").as_uri(), 1280, "light")
    sections = {one["title"]: one["parts"] for one in json.loads((ROOT / "docs" / "compatibility.json").read_text())}
    rows = {title: sum(len(p["rows"]) for p in parts if isinstance(p, dict)) for title, parts in sections.items()}
    assert len(page.evaluate(VISIBLE)) == rows["Scores"]  # one family at a time
    page.select_option(".filter select", label="Attacks")
    assert len(page.evaluate(VISIBLE)) == rows["Attacks"]
    page.check(".filter input[type=checkbox]")
    refused = page.evaluate(VISIBLE)
    assert 0 < len(refused) <= rows["Attacks"]
    assert all("no" in row for row in refused)
    page.fill(".filter input[type=search]", "BATCH norm")
    found = page.evaluate(VISIBLE)
    assert 0 < len(found) < len(refused)
    assert all("batch" in " ".join(row).lower() and "norm" in " ".join(row).lower() for row in found)
    page.goto((site / "results" / "items.html").as_uri() + "#tradeoff")  # a link to a section shows it
    assert page.locator("h3#tradeoff").is_visible()
    assert not page.locator("h3#table1").is_visible()
    assert complaints(trouble) == []
    page.close()


# A switch of colours is seen by its label.
FOCUS = """() => {
  const e = document.activeElement, shown = e.matches('.md-option') ? e.nextElementSibling : e
  const grounds = []
  for (let up = shown.parentElement; up; up = up.parentElement) grounds.push(getComputedStyle(up).backgroundColor)
  const style = getComputedStyle(shown), box = shown.getBoundingClientRect()
  return {text: e.innerText.trim(), ring: style.outlineStyle !== 'none' && box.width > 0 ? style.outlineColor : null,
          ground: grounds.find(c => c !== 'rgba(0, 0, 0, 0)'), inside: !!e.closest('article')}
}"""
SETTLED = """() => Promise.allSettled(document.getAnimations().filter(
  one => one.effect.getComputedTiming().endTime < Infinity).map(one => one.finished)).then(() => null)"""
HREFS = "all => all.slice(0, 10).map(one => one.getAttribute('href'))"


def test_the_keyboard_alone_gets_past_the_menu_and_to_another_part(browser: Any, site: Path) -> None:
    page, trouble = open_page(browser, (site / "index.html").as_uri(), 1280, "light")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS)["text"] == "Skip to content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS)["inside"]  # a link of the text, not of the menu
    page.goto((site / "index.html").as_uri())
    for _ in range(20):
        page.keyboard.press("Tab")
        page.evaluate(SETTLED)
        now = page.evaluate(FOCUS)
        assert now["ring"], now
        assert contrast(rgb(now["ring"]), rgb(now["ground"])) >= 3, now
        if now["text"] == "How-to":
            break
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("how-to/audit-my-model"), timeout=60_000)
    assert complaints(trouble) == []
    page.close()


def test_the_picture_of_the_first_page_is_small() -> None:
    picture = ROOT / "docs" / "img" / "site.png"
    assert picture.stat().st_size < 100_000  # tools/pictures.py makes it


def test_search_works_from_disk_by_keyboard(browser: Any, site: Path) -> None:
    page, trouble = open_page(browser, (site / "index.html").as_uri(), 1280, "light")
    page.keyboard.press("/")
    page.keyboard.type("inverter")
    page.locator('[role=option][href*="learned-attacks.html?h=inverter"]').first.wait_for(timeout=60_000)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("learned-attacks"), timeout=60_000)
    assert complaints(trouble) == []
    page.close()


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("what does epsilon 8 mean for my patients", "glossary.html"),
        ("ε", "glossary.html"),
        ("what can a privacy officer file", "read-the-report.html"),
        ("cifar10", "bring-my-data.html"),
    ],
)
def test_the_search_finds_what_people_ask_with_greek_letters_and_digits(
    browser: Any, site: Path, question: str, answer: str
) -> None:
    page, trouble = open_page(browser, (site / "index.html").as_uri(), 1280, "light")
    page.keyboard.press("/")
    page.keyboard.type(question)
    first_ten: list[str] = []
    for _ in range(600):  # answers to what was typed so far come and go
        if any(answer in one for one in first_ten):
            break
        page.wait_for_timeout(100)
        first_ten = page.locator("[role=option]").evaluate_all(HREFS)
    assert any(answer in one for one in first_ten), first_ten
    assert complaints(trouble) == []
    page.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("[no page](nowhere.md)", "nowhere.md"),
        ("[no section](terminal.md#nowhere)", "anchor does not exist"),
        ("![no picture](img/nowhere.png)", "img/nowhere.png"),
    ],
)
def test_a_link_that_leads_nowhere_fails(tmp_path: Path, site: Path, wrong: str, said: str) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (docs / "speed.md").open("a") as page:
        page.write(f"\n{wrong}\n")
    with pytest.raises(SystemExit, match=re.escape(said)):
        build_site.build(tmp_path / "site", docs)


def test_a_page_that_the_menu_leaves_out_fails(tmp_path: Path, site: Path) -> None:
    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (docs / "orphan.md").write_text("# Nobody finds me\n")
    with pytest.raises(SystemExit, match="orphan"):
        build_site.build(tmp_path / "site", docs)
