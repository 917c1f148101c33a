"""Take the picture of the playground that stands on its page; needs the extra `play`, playwright and Chromium.

python tools/play_picture.py [docs/img/play.png]
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from gradveil_studies.play.page import Playground

OUT = Path(__file__).resolve().parents[1] / "docs" / "img" / "play.png"


def main(out: Path) -> None:
    """Open the page, turn Gaussian noise up over eight rounds, and keep what is seen."""
    playground = Playground()
    address = playground.launch()
    with sync_playwright() as play:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(address)
        page.get_by_label("range slider for Strength, weak to strong").fill("5")
        page.locator(".gv-said", has_text="gaussian:scale=0.1: done.").wait_for(timeout=120_000)
        page.get_by_label("range slider for Rounds that the server sees").fill("8")
        page.locator(".gv-card h3", has_text="Multi-round server, 8 rounds").wait_for(timeout=120_000)
        page.locator(".gv-said", has_text="gaussian:scale=0.1: done.").wait_for(timeout=120_000)
        taken = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        browser.close()
    taken.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(out, optimize=True)
    playground.page.close()
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
