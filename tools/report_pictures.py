"""Take the pictures of docs/how-to/read-the-report.md from a run's report, in headless Chromium.

gradveil audit --out runs/demo && python tools/report_pictures.py runs/demo
"""

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

HOME = Path(__file__).parent.parent / "docs" / "img"
LARGEST = 100_000  # bytes of a picture
COLOURS = 256


def main() -> None:
    """Draw the report of a run and take its pictures."""
    from playwright.sync_api import sync_playwright

    from gradveil.report.page import write_report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of an audit of images")
    address = write_report(parser.parse_args().run).resolve().as_uri()
    with sync_playwright() as play:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1060, "height": 700})
        page.goto(address)
        keep("report-first-screen", page.screenshot())
        keep("report-card", page.locator(".card").nth(1).screenshot())
        keep("report-film", page.locator("#films").screenshot())
        figure = page.locator("figure.chart").nth(1)
        figure.scroll_into_view_if_needed()
        figure.locator("[data-series='1'][aria-label]").first.focus()
        keep("report-figure", page.screenshot(clip=around(figure)))
        page.locator(".card").nth(1).locator(".server:nth-of-type(3) img, .server img[data-example]").first.click()
        keep("report-large", page.locator("dialog").screenshot())
        phone = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        phone.goto(address)
        keep("report-phone-dark", phone.screenshot())
        browser.close()


def around(part: Any, more: float = 40.0) -> dict[str, float]:
    """Return a box somewhat larger than a part of the page, for what hangs over its edge."""
    box = part.bounding_box()
    assert box is not None
    left, top = max(0.0, box["x"] - more), max(0.0, box["y"] - more)
    return {"x": left, "y": top, "width": box["width"] + 2 * more, "height": box["height"] + more}


def keep(name: str, png: bytes) -> None:
    """Write a picture with few colours, as small as that makes it."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(buffer, format="PNG", optimize=True)
    if buffer.tell() > LARGEST:
        raise SystemExit(f"{name}: {buffer.tell()} bytes, at most {LARGEST}. Take a smaller part of the page.")
    (HOME / f"{name}.png").write_bytes(buffer.getvalue())
    print(f"{name}: {buffer.tell()} bytes")


if __name__ == "__main__":
    main()
