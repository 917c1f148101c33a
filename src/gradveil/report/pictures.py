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

from gradveil.experiments.judge import Verdict, by_tier
from gradveil.experiments.rows import NAIVE, Line, MeasuredExample, group, modality_of, read, server_name
from gradveil.experiments.run_folder import RunFolder
from gradveil.experiments.words import badges
from gradveil.files import write_atomically
from gradveil.metrics.intervals import short
from gradveil.modalities import Cell, Modality


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


@dataclass(frozen=True)
class Strip:
    """Pictures in a row, or rows of cells, with what made them."""

    what: str
    how: str
    shots: list[Shot]
    heads: tuple[str, ...] = ()  # over the cells


@dataclass(frozen=True)
class RoundPictures:
    """The strips of one round."""

    title: str
    shown: list[Strip]
    rest: list[Strip] = field(default_factory=list)


def pictures(store: RunFolder, found: Sequence[Line]) -> list[RoundPictures]:
    """Return the pictures by round: the strongest attack of each server on each defence first, the others apart."""
    attacked = read(store.rows, "attack")
    arrays = {unit: store.arrays(unit) for unit in dict.fromkeys([TRUTH, *(m.unit for m in attacked)])}
    kind = modality_of(store.rows)
    head = _originals(arrays[TRUTH], read(store.rows, "floor"), kind)
    result = []
    for (round_, number), here in group(attacked, "round", "round_number").items():
        by_line = group(here, *KEY)
        lines = {x.key: x for x in found if x.round == round_}
        first = _first_choice(list(lines.values())) if lines else set(by_line)
        ordered = [*lines, *(key for key in by_line if key not in lines)]
        strips = {key: _strip(by_line[key], lines.get(key), arrays, kind) for key in ordered}
        shown = [strip for key, strip in strips.items() if key in first]
        rest = [strip for key, strip in strips.items() if key not in first]
        title = f"The {round_} round" + (f" (round {number})" if number else "") if round_ != "update" else "The update"
        result.append(RoundPictures(title, [*head, *shown], rest))
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
    kind = modality_of(store.rows)
    if _shot(kind, truth[0], "").cells:
        return {}
    first = group([m for m in read(store.rows, "attack") if m.example == 0], "round", *KEY)
    result = {}
    for verdict in judged:
        shown = [Thumb(picture(truth[0]), "original", "original")]
        naive = "any server" if verdict.defense == "none" else "naive server"
        beyond = [
            (t.line, f"{t.tier} server") for t in verdict.tiers[2:] if t.line is not None and t.line.tier == t.tier
        ]
        for line, caption in ((verdict.naive, naive), (verdict.adaptive, "server that knows"), *beyond):
            mine = first.get((line.round, *line.key)) if line is not None else None
            if mine:
                got = store.arrays(mine[-1].unit)["found"][mine[-1].index]
                shown.append(Thumb(picture(got), f"{caption}: {kind.error_name} {short(mine[-1].error)}", caption))
        result[verdict.defense] = shown
    return result


def _first_choice(found: Sequence[Line]) -> set[tuple[str, ...]]:
    """Return the strongest line of each tier, per defence (and for the control)."""
    best = [line for name in {x.defense for x in found} for line in by_tier(found, name).values()]
    return {line.key for line in best if line is not None}


def _originals(arrays: dict[str, NDArray[Any]], floors: Sequence[MeasuredExample], kind: Modality) -> list[Strip]:
    strips = []
    known = (("truth", "Original", "what the client holds"), ("stand-in", "Stand-ins", "public, for the control"))
    for name, what, how in known:
        if name in arrays:
            shots = [_shot(kind, x, f"{what} {i}") for i, x in enumerate(arrays[name][:MOST])]
            strips.append(Strip(what, how, shots, kind.heads))
    for (guess,), mine in group(floors, "guess").items():
        shots = [_measured(m, arrays[guess][m.example], kind, arrays) for m in mine[:MOST] if guess in arrays]
        strips.append(Strip(f"Blind guess: {guess}", "without any update", shots, kind.heads))
    return strips


def _strip(
    mine: Sequence[MeasuredExample], line: Line | None, arrays: dict[str, dict[str, NDArray[Any]]], kind: Modality
) -> Strip:
    one = mine[0]
    what = "Control: no defence" if one.defense == "none" else one.defense
    if one.defense == "none" and one.weights not in ("none", "start"):
        what += f", model trained under {one.weights}"
    server = "" if one.defense == "none" else "naive server, " if one.server == NAIVE else f"{server_name(one)}, "
    how = f"{server}{one.attack}"
    if line is not None:
        how += f" · {'void' if not line.counts else badges(kind)[line.grade].lower()}"
        how += f" · {kind.error_name} {short(line.error.mean)}"
        if line.identified.count:
            how += f" · {line.identified.hits}/{line.identified.count} identified"
    there = [m for m in mine if "found" in arrays[m.unit]]
    how += _surest([_measured(m, arrays[m.unit]["found"][m.index], kind, arrays[TRUTH]) for m in there], there)
    shots = [_measured(m, arrays[m.unit]["found"][m.index], kind, arrays[TRUTH]) for m in there[:MOST]]
    return Strip(what, how, shots, kind.heads)


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


def _measured(m: MeasuredExample, x: NDArray[Any], kind: Modality, arrays: dict[str, NDArray[Any]]) -> Shot:
    """Return what an attack or a guess made of an example, beside its original where there is one."""
    if not m.known:
        return _shot(kind, x, f"reconstruction {m.example}")
    hit = m.identified == 1.0
    alt = f"{kind.one} {m.example}: {kind.error_name} {short(m.error)}"
    alt += ", picks its original out of the gallery" if hit else ""
    truth = arrays.get("truth", arrays.get("stand-in"))
    return replace(_shot(kind, x, alt, None if truth is None else truth[m.example]), error=f"{m.error:.1g}", hit=hit)


def _shot(kind: Modality, x: NDArray[Any], alt: str, truth: NDArray[Any] | None = None) -> Shot:
    true = None if truth is None else torch.from_numpy(truth)
    cells = kind.cells(torch.from_numpy(x), true)
    if cells is None:
        return Shot(picture(x), alt)
    return Shot("", alt, cells=cells, truth=(kind.cells(true) if true is not None else None) or ())
