"""The pictures of README, pages and site; all but the README's need playwright and Chromium.

python tools/pictures.py readme --data FOLDER    what a server gets back, by defence and by what it knows
python tools/pictures.py report runs/demo        the pictures of how-to/read-the-report.md, from an audit of images
python tools/pictures.py play                    the playground (extra `play`)
python tools/pictures.py site                    the site's first page (extra `site`)
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / "docs" / "img"
LARGEST = 100_000  # bytes of a picture
DLG = "dlg:steps=120,restarts=3"
# title -> defence, which countermeasure (None: the oblivious server), and the attack where that names none
COLUMNS: dict[str, tuple[str, str | None, str]] = {
    "no defence": ("none", None, DLG),
    "ours 40 %\noblivious server": ("representation:share=0.4", None, DLG),
    "ours 40 %\nadaptive server": ("representation:share=0.4", "drop", DLG),
    "pruning 90 %\noblivious server": ("pruning:share=0.9", None, DLG),
    "pruning 90 %\nadaptive server": ("pruning:share=0.9", "mask", "newton"),
    "noise 1 x rms\noblivious server": ("gaussian:scale=1,relative=true", None, DLG),
    "noise 1 x rms\nadaptive server": ("gaussian:scale=1,relative=true", "whiten", DLG),
}


@contextmanager
def browser() -> Iterator[Any]:
    """Open headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        opened = play.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


def keep(name: str, png: bytes, colours: int = 256, size: tuple[int, int] | None = None) -> None:
    """Write a picture with few colours, as small as that makes it."""
    image, buffer = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    image = image.resize(size, Image.Resampling.LANCZOS) if size else image
    image.quantize(colours).save(buffer, format="PNG", optimize=True)
    if buffer.tell() > LARGEST:
        raise SystemExit(f"{name}: {buffer.tell()} bytes, at most {LARGEST}. Take a smaller part of the page.")
    (HOME / f"{name}.png").write_bytes(buffer.getvalue())
    print(f"{name}: {buffer.tell():,} bytes")


def play() -> None:
    """Open the playground, turn Gaussian noise up over eight rounds, and keep what is seen."""
    from gradveil_studies.play.page import Playground

    playground = Playground()
    address = playground.launch()
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(address)
        page.get_by_label("range slider for Strength, weak to strong").fill("5")
        page.locator(".gv-said", has_text="gaussian:scale=0.1: done.").wait_for(timeout=120_000)
        page.get_by_label("range slider for Rounds that the server sees").fill("8")
        page.locator(".gv-card h3", has_text="Multi-round server, 8 rounds").wait_for(timeout=120_000)
        page.locator(".gv-said", has_text="gaussian:scale=0.1: done.").wait_for(timeout=120_000)
        keep("play", page.screenshot(full_page=True), 64)
    playground.page.close()


def site() -> None:
    """Build the site and keep its first page, at three quarters of its size."""
    with tempfile.TemporaryDirectory() as folder, browser() as opened:
        subprocess.run([sys.executable, ROOT / "tools" / "build_site.py", folder], check=True)
        page = opened.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto((Path(folder) / "index.html").as_uri())
        keep("site", page.screenshot(), 48, (960, 600))


def report(run: Path) -> None:
    """Draw the report of a run and keep its parts."""
    from gradveil.report.page import write_report

    address = write_report(run).resolve().as_uri()
    with browser() as opened:
        page = opened.new_page(viewport={"width": 1060, "height": 700})
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
        phone = opened.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        phone.goto(address)
        keep("report-phone-dark", phone.screenshot())


def around(part: Any, more: float = 40.0) -> dict[str, float]:
    """Return a box somewhat larger than a part of the page, for what hangs over its edge."""
    box = part.bounding_box()
    assert box is not None
    left, top = max(0.0, box["x"] - more), max(0.0, box["y"] - more)
    return {"x": left, "y": top, "width": box["width"] + 2 * more, "height": box["height"] + more}


def readme(data: str | None, count: int = 4) -> None:
    """Attack a few images under each setting and draw them side by side."""
    import matplotlib as mpl
    import torch

    from gradveil.data import load
    from gradveil.metrics import measure
    from gradveil.models import build
    from gradveil.protection.defense import build as defense
    from gradveil.threats.panel import oblivious
    from gradveil.threats.trial import Trial, solved
    from gradveil_studies.paper.base import Context
    from gradveil_studies.paper.panels import Shared

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    dataset, context = load("cifar10", data), Context(data)
    model = build("lenet", dataset.input_shape, dataset.num_classes, seed=context.seeds.number("weights"))
    scene = Shared.draw(model, dataset, count, context)
    shown = [("original", scene.truth.inputs)]
    for title, (spec, counter, by) in COLUMNS.items():
        known = {c.name: c for c in defense(spec).servers(scene.model)}
        server = oblivious() if counter is None else known[counter]
        seen = enumerate(scene.observe(spec))
        trials = [Trial(s, server, server.attack or by, scene.seeds("picture", i)) for i, s in seen]
        shown.append((title, torch.cat([found.inputs for found in solved(trials)])))
    shown.append(("blind guess\nmean image", scene.public.batch.inputs.mean(0).expand_as(scene.truth.inputs)))
    figure, axes = plt.subplots(count, len(shown), figsize=(1.45 * len(shown), 1.55 * count + 0.5))
    for j, (title, images) in enumerate(shown):
        for i, axis in enumerate(axes[:, j]):
            axis.imshow(images[i].permute(1, 2, 0).squeeze().clamp(0, 1), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            values, _ = measure(images[i : i + 1], None, scene.truth[i : i + 1])
            axis.set_xlabel("" if j == 0 else f"MSE {float(values['mse']):.2g}", fontsize=8)
        axes[0, j].set_title(title, fontsize=9)
    figure.tight_layout(pad=0.4)
    figure.savefig(HOME / "reconstructions.png", dpi=110)


def main() -> None:
    """Take the pictures that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["readme", "report", "play", "site"])
    parser.add_argument("run", nargs="?", type=Path, help="the folder of an audit of images (report)")
    parser.add_argument("--data", help="the folder with the data sets (readme)")
    given = parser.parse_args()
    if given.what == "readme":
        readme(given.data)
    elif given.what == "report":
        report(given.run)
    else:
        {"play": play, "site": site}[given.what]()


if __name__ == "__main__":
    main()
