"""Examples as a person looks at them in a page: small PNGs written into it, or cells, true beside recovered."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.files import write_atomically
from gradveil.metrics import short
from gradveil.modalities import Cell
from gradveil.report.plain import name_of
from gradveil.threats.rows import OBLIVIOUS, Line, MeasuredExample, group, modality_of, read
from gradveil.threats.verdict import DIAGNOSTIC, badges, by_tier, server_name


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
KEY = ("weights", "defense", "tier", "server", "attack")  # what tells the lines of a round apart


@dataclass(frozen=True)
class Shot:
    """One picture, or the cells of one example and of its original, with what is said of it."""

    src: str
    alt: str
    error: str = ""
    hit: bool = False  # picked its original out of the gallery
    cells: Sequence[Cell] = ()
    truth: Sequence[Cell] = ()
    original: int | None = None  # its number, where it is one
    example: int | None = None  # the number of its original, where that is known


@dataclass(frozen=True)
class Strip:
    """Pictures in a row, or rows of cells, with what made them."""

    what: str
    how: str
    shots: list[Shot]
    heads: tuple[str, ...] = ()  # over the cells
    spec: str = ""  # of the defence


@dataclass(frozen=True)
class RoundPictures:
    """The strips of one round."""

    title: str
    shown: list[Strip]
    rest: list[Strip] = field(default_factory=list)


class Gallery:
    """The examples of a run: originals, guesses, and what attacks brought back."""

    def __init__(self, store: RunFolder) -> None:
        self.kind = modality_of(store.rows)
        self._store = store
        self._units: dict[str, dict[str, NDArray[Any]]] = {}

    def arrays(self, unit: str) -> dict[str, NDArray[Any]]:
        """Return the arrays of a unit by name."""
        if unit not in self._units:
            self._units[unit] = self._store.arrays(unit)
        return self._units[unit]

    def original(self, number: int, what: str = "original") -> Shot:
        """Return an original, or the public example that stands in for one."""
        truth = self._truth
        assert truth is not None
        return replace(self._shot(truth[number], f"{what} {number}"), original=number)

    def found(self, m: MeasuredExample) -> Shot:
        """Return what an attack brought back of an example, or what a blind guess says, beside its original."""
        x = self.arrays(TRUTH)[m.guess][m.example] if m.guess else self.arrays(m.unit)["found"][m.index]
        if not m.known:
            return self._shot(x, f"reconstruction {m.example}")
        hit = m.identified == 1.0
        alt = f"{self.kind.one} {m.example}: {self.kind.error_name} {short(m.error)}"
        alt += ", picks its original out of the gallery" if hit else ""
        truth = self._truth
        shot = self._shot(x, alt, None if truth is None else truth[m.example])
        return replace(shot, error=f"{m.error:.1g}", hit=hit, example=None if truth is None else m.example)

    @property
    def _truth(self) -> NDArray[Any] | None:
        known = self.arrays(TRUTH)
        return known.get("truth", known.get("stand-in"))

    def _shot(self, x: NDArray[Any], alt: str, truth: NDArray[Any] | None = None) -> Shot:
        true = None if truth is None else torch.from_numpy(truth)
        cells = self.kind.cells(torch.from_numpy(x), true)
        if cells is None:
            return Shot(picture(x), alt)
        return Shot("", alt, cells=cells, truth=(self.kind.cells(true) if true is not None else None) or ())


def pictures(gallery: Gallery, rows: Sequence[Row], found: Sequence[Line]) -> list[RoundPictures]:
    """Return the pictures by round: the strongest attack of each server on each defence first, the others apart."""
    attacked = read(rows, "attack")
    head = _originals(gallery, read(rows, "floor"))
    result = []
    for (round_, number), here in group(attacked, "round", "round_number").items():
        by_line = group(here, *KEY)
        lines = {x.key: x for x in found if x.round == round_}
        first = _first_choice(list(lines.values())) if lines else set(by_line)
        ordered = [*lines, *(key for key in by_line if key not in lines)]
        strips = {key: _strip(gallery, by_line[key], lines.get(key)) for key in ordered}
        shown = [strip for key, strip in strips.items() if key in first]
        rest = [strip for key, strip in strips.items() if key not in first]
        title = f"The {round_} round" + (f" (round {number})" if number else "") if round_ != "update" else "The update"
        result.append(RoundPictures(title, [*head, *shown], rest))
    return result


def _first_choice(found: Sequence[Line]) -> set[tuple[str, ...]]:
    """Return the strongest line of each tier, per defence (and for the control)."""
    best = [line for name in {x.defense for x in found} for line in by_tier(found, name).values()]
    return {line.key for line in best if line is not None}


def _originals(gallery: Gallery, floors: Sequence[MeasuredExample]) -> list[Strip]:
    strips, known, heads = [], gallery.arrays(TRUTH), gallery.kind.heads
    names = (("truth", "Original", "what the client holds"), ("stand-in", "Stand-ins", "public, for the control"))
    for name, what, how in names:
        if name in known:
            shots = [gallery.original(i, what) for i in range(min(MOST, len(known[name])))]
            strips.append(Strip(what, how, shots, heads))
    for (guess,), mine in group(floors, "guess").items():
        shots = [gallery.found(m) for m in mine[:MOST] if guess in known]
        strips.append(Strip(f"Blind guess: {guess}", "without any update", shots, heads))
    return strips


def _strip(gallery: Gallery, mine: Sequence[MeasuredExample], line: Line | None) -> Strip:
    one, kind = mine[0], gallery.kind
    what = name_of(one.defense)
    if one.defense == "none":
        what = "Control: no defence"
        under = "model in" if one.weights == DIAGNOSTIC else "model trained under"
        what += f", {under} {name_of(one.weights)}" if one.weights not in ("none", "start") else ""
    server = (
        "" if one.defense == "none" else "oblivious server, " if one.server == OBLIVIOUS else f"{server_name(one)}, "
    )
    how = f"{server}{one.attack}"
    if line is not None:
        how += f" · {'void' if not line.counts else badges(kind)[line.grade].lower()}"
        how += f" · {kind.error_name} {line.error}"
        if line.identified.count:
            how += f" · {line.identified.as_count} identified"
    there = [m for m in mine if "found" in gallery.arrays(m.unit)]
    shots = [gallery.found(m) for m in there]
    return Strip(what, how + _surest(shots, there), shots[:MOST], kind.heads, one.defense)


def _surest(shots: Sequence[Shot], mine: Sequence[MeasuredExample]) -> str:
    """Return how often the attack is right where it is surest: the half of its cells that its starts agree on most."""
    pairs = [
        (sure, bool(c.right))
        for s, m in zip(shots, mine, strict=True)
        for sure, c in zip(m.confidence, s.cells, strict=False)
    ]
    if not pairs or not all(m.known for m in mine):
        return ""
    half = sorted(pairs, key=lambda pair: -pair[0])[: -(-len(pairs) // 2)]
    return (
        f" · right on {sum(right for _, right in half) / len(half):.0%} of the half of its cells that it is surest of"
    )
