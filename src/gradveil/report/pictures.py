"""Arrays as pictures in a page: small PNGs written into the page itself."""

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(array: NDArray[Any]) -> str:
    """Return one example in [0, 1] as a ``data:`` address of a PNG.

    (1, H, W) is grey, (3, H, W) is colour; anything else is laid out as a near-square grey picture.
    """
    buffer = io.BytesIO()
    _image(np.asarray(array, dtype=float)).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


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
