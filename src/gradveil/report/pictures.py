"""Arrays as pictures in a page: small PNGs written into the page itself."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.experiments.store import write_atomically


def picture(array: NDArray[Any]) -> str:
    """Return one example in [0, 1] as a ``data:`` address of a PNG.

    (1, H, W) is grey, (3, H, W) is colour; anything else is laid out as a near-square grey picture.
    """
    buffer = io.BytesIO()
    _image(np.asarray(array, dtype=float)).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_pictures(path: Path, examples: NDArray[Any], smallest: int = 128) -> None:
    """Write examples (N, *shape) in [0, 1] side by side as a PNG, enlarged to at least ``smallest`` pixels a side."""
    tiles = [_image(np.asarray(x, dtype=float)) for x in examples]
    width, height = tiles[0].size
    times = max(1, -(-smallest // max(width, height)))
    sheet = Image.new(
        tiles[0].mode, (len(tiles) * (width * times + times), height * times), 255 if tiles[0].mode == "L" else "white"
    )
    for i, tile in enumerate(tiles):
        sheet.paste(
            tile.resize((width * times, height * times), Image.Resampling.NEAREST), (i * (width + 1) * times, 0)
        )
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    write_atomically(path, buffer.getvalue())


def _image(array: NDArray[Any]) -> Image.Image:
    pixels = np.rint(np.clip(np.nan_to_num(array, nan=0.5), 0, 1) * 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[0] == 3:
        return Image.fromarray(np.ascontiguousarray(np.moveaxis(pixels, 0, -1)), "RGB")
    if pixels.ndim == 3 and pixels.shape[0] == 1:
        return Image.fromarray(np.ascontiguousarray(pixels[0]), "L")
    flat = pixels.reshape(-1)
    width = int(np.ceil(np.sqrt(flat.size)))
    padded = np.zeros(width * -(-flat.size // width), dtype=np.uint8)
    padded[: flat.size] = flat
    return Image.fromarray(padded.reshape(-1, width), "L")
