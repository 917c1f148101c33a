"""The documentation site: built strictly, and opened from disk in a real browser."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradveil
from browsing import faint, open_page

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra `site` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("page", ["index", "how-to/audit-my-model", "results/leaderboard"])
def test_a_page_opens_from_disk_fits_and_can_be_read(
    browser: Any, site: Path, page: str, width: int, scheme: str
) -> None:
    opened, trouble = open_page(browser, (site / f"{page}.html").as_uri(), width, scheme)
    assert trouble == []
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    assert faint(opened) == []
    opened.close()


def test_search_works_from_disk_by_keyboard(browser: Any, site: Path) -> None:
    page, trouble = open_page(browser, (site / "index.html").as_uri(), 1280, "light")
    page.keyboard.press("/")
    page.keyboard.type("diffusion")
    page.locator('.md-search-result__link[href*="learned-attacks.html?h=diffusion"]').first.wait_for(timeout=60_000)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("learned-attacks"), timeout=60_000)
    assert trouble == []
    page.close()
