"""Draw the images that GS rebuilt: original, undefended, then ours and GC at every rate."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.paper.base import Row
from gradveil.paper.drawing import figure

LINES = (
    ("representation", "naive", "ours,\nnaive server"),
    ("representation", "mask", "ours,\nreads the mask"),
    ("representation", "drop", "ours,\ndrops the layer"),
    ("pruning", "naive", "GC,\nnaive server"),
    ("pruning", "mask", "GC,\nreads the mask"),
)


def draw(rows: Sequence[Row], path: Path, rates: Sequence[float]) -> None:
    """Write ``path`` with the endings .svg and .png: one block of lines for each image."""
    kept = {(r["defense"], r["server"], r["image"]): r for r in rows}
    images = sorted({r["image"] for r in rows})
    lines = len(LINES) * max(1, len(images))
    with figure(path, 1.15 * (len(rates) + 3), 1.2 * lines) as empty:
        axes = empty.subplots(lines, len(rates) + 3, squeeze=False)  # original, undefended, words, rates
        for axis in axes.flat:
            axis.set_axis_off()
        for block, image in enumerate(images):
            top = block * len(LINES)
            _show(axes[top, 0], kept.get(("(truth)", "(truth)", image)), "original")
            _show(axes[top, 1], kept.get(("none", "naive", image)), "no defence")
            for line, (defense, server, words) in enumerate(LINES, start=top):
                axes[line, 2].text(0.5, 0.5, words, fontsize=7, ha="center", va="center")
                for column, rate in enumerate(rates, start=3):
                    row = kept.get((f"{defense}:share={rate}", server, image))
                    _show(axes[line, column], row, f"{rate:.0%}" if line == top else "")


def _show(axis: Any, row: Row | None, words: str) -> None:
    if row is None:
        return
    pixels = decoded(row["picture"])
    axis.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    mse = f"MSE {row['mse']:.3f}" if "mse" in row else ""
    axis.set_title("\n".join(filter(None, (words, mse))), fontsize=7, pad=2)


def decoded(text: str) -> NDArray[np.uint8]:
    """Return the pixels (H, W) or (H, W, 3) of a picture that a row holds."""
    data = base64.b64decode(text.partition("base64,")[2])
    return np.asarray(Image.open(io.BytesIO(data)))
