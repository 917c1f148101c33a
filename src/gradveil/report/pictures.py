"""Arrays as pictures in a page: small PNGs written into the page itself."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from gradveil.experiments.judge import BADGES, Verdict, strongest
from gradveil.experiments.rows import NAIVE, Line
from gradveil.experiments.run_folder import Row, RunFolder
from gradveil.files import write_atomically
from gradveil.metrics.intervals import short


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


MOST = 12  # pictures in a strip; the rest is in the run folder
TRUTH = "truth"  # the unit that holds the originals


@dataclass(frozen=True)
class Shot:
    """One picture with what is said of it."""

    src: str
    alt: str
    mse: str = ""
    hit: bool = False  # picked its original out of the gallery


@dataclass(frozen=True)
class Strip:
    """Pictures in a row, with what made them."""

    what: str
    how: str
    shots: list[Shot]


@dataclass(frozen=True)
class Album:
    """The strips of one round."""

    title: str
    shown: list[Strip]
    rest: list[Strip] = field(default_factory=list)


def albums(store: RunFolder, found: Sequence[Line]) -> list[Album]:
    """Return one album per round: the strongest attack of each server on each defence first, the others apart."""
    rows = [row for row in store.rows if row["kind"] == "attack"]
    arrays = {unit: store.arrays(unit) for unit in dict.fromkeys([TRUTH, *(row["unit"] for row in rows)])}
    head = _originals(arrays[TRUTH], [row for row in store.rows if row["kind"] == "floor"])
    result = []
    for round_ in dict.fromkeys(row["round"] for row in rows):
        here = [row for row in rows if row["round"] == round_]
        by_line: dict[tuple[str, ...], list[Row]] = {}
        for row in here:
            by_line.setdefault(_key(row), []).append(row)
        lines = {_line_key(x): x for x in found if x.round == round_}
        first = _first_choice(list(lines.values())) if lines else set(by_line)
        ordered = [*lines, *(key for key in by_line if key not in lines)]
        strips = {key: _strip(by_line[key], lines.get(key), arrays) for key in ordered}
        shown = [strip for key, strip in strips.items() if key in first]
        rest = [strip for key, strip in strips.items() if key not in first]
        number = here[0]["round_number"]
        title = f"The {round_} round" + (f" (round {number})" if number else "") if round_ != "update" else "The update"
        result.append(Album(title, [*head, *shown], rest))
    return result


@dataclass(frozen=True)
class Thumb:
    """A picture on a verdict's card."""

    src: str
    alt: str
    caption: str


def thumbs(store: RunFolder, judged: Sequence[Verdict]) -> dict[str, list[Thumb]]:
    """Return the first image for each defence: the original and what the strongest server of each kind got."""
    truth = store.arrays(TRUTH).get("truth")
    if truth is None:
        return {}
    first = {(row["round"], *_key(row)): row for row in store.rows if row["kind"] == "attack" and row["example"] == 0}
    result = {}
    for verdict in judged:
        shown = [Thumb(picture(truth[0]), "original", "original")]
        naive = "any server" if verdict.defense == "none" else "naive server"
        for line, caption in ((verdict.naive, naive), (verdict.adaptive, "server that knows")):
            row = first.get((line.round, *_line_key(line))) if line is not None else None
            if row is not None:
                found = store.arrays(row["unit"])["found"][row["index"]]
                shown.append(Thumb(picture(found), f"{caption}: MSE {short(row['mse'])}", caption))
        result[verdict.defense] = shown
    return result


def _key(row: Row) -> tuple[str, ...]:
    return (row["weights"], row["defense"], row["server"], row["attack"])


def _line_key(line: Line) -> tuple[str, ...]:
    return (line.weights, line.defense, line.server, line.attack)


def _first_choice(found: Sequence[Line]) -> set[tuple[str, ...]]:
    """Return the strongest line of the naive server and of the knowing one, per defence (and for the control)."""
    groups: dict[tuple[str, bool], list[Line]] = {}
    for line in found:
        if line.defense != "none" or line.weights in ("none", "start"):
            groups.setdefault((line.defense, line.server == NAIVE), []).append(line)
    best = [strongest(group) for group in groups.values()]
    return {_line_key(line) for line in best if line is not None}


def _originals(arrays: dict[str, NDArray[Any]], floors: Sequence[Row]) -> list[Strip]:
    strips = []
    known = (("truth", "Original", "what the client holds"), ("stand-in", "Stand-ins", "public, for the control"))
    for name, what, how in known:
        if name in arrays:
            shots = [Shot(picture(x), f"{what} {i}") for i, x in enumerate(arrays[name][:MOST])]
            strips.append(Strip(what, how, shots))
    for guess in dict.fromkeys(row["guess"] for row in floors):
        mine = [row for row in floors if row["guess"] == guess]
        pictures = [(row, arrays[guess][row["example"]]) for row in mine if guess in arrays]
        strips.append(Strip(f"Blind guess: {guess}", "without any update", [_shot(r, x) for r, x in pictures[:MOST]]))
    return strips


def _strip(group: Sequence[Row], line: Line | None, arrays: dict[str, dict[str, NDArray[Any]]]) -> Strip:
    row = group[0]
    what = "Control: no defence" if row["defense"] == "none" else str(row["defense"])
    if row["defense"] == "none" and row["weights"] not in ("none", "start"):
        what += f", model trained under {row['weights']}"
    server = "" if row["defense"] == "none" else "naive server, " if row["server"] == NAIVE else f"{row['server']}, "
    how = f"{server}{row['attack']}"
    if line is not None:
        how += f" · {'void' if not line.counts else BADGES[line.grade].lower()} · MSE {short(line.mse.mean)}"
        if line.identified.count:
            how += f" · {line.identified.hits}/{line.identified.count} identified"
    pictures = [(r, arrays[r["unit"]]["found"][r["index"]]) for r in group if "found" in arrays[r["unit"]]]
    return Strip(what, how, [_shot(r, x) for r, x in pictures[:MOST]])


def _shot(row: Row, x: NDArray[Any]) -> Shot:
    if row["mse"] is None:
        return Shot(picture(x), f"reconstruction {row['example']}")
    hit = bool(row["identified"])
    alt = f"image {row['example']}: MSE {short(row['mse'])}{', picks its original out of the gallery' if hit else ''}"
    return Shot(picture(x), alt, f"{row['mse']:.1g}", hit)
