"""Build the site and take the picture of its first page; needs the extra `site`, playwright and Chromium.

python tools/site_picture.py [docs/img/site.png]
"""

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]


def main(out: Path) -> None:
    """Open the first page from disk and keep what is seen, at three quarters of its size."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder], cwd=ROOT, check=True)
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto((Path(folder) / "index.html").as_uri())
        taken = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    small = taken.convert("RGB").resize((960, 600), Image.Resampling.LANCZOS)
    small.convert("P", palette=Image.Palette.ADAPTIVE, colors=48).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "img" / "site.png")
