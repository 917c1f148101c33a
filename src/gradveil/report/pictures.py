"""Examples as a person looks at them in a page: PNGs written into it, or cells; in strips, films, columns and cards."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.auditing.work import FILM
from gradveil.metrics import rate, short
from gradveil.modalities import Cell, Modality
from gradveil.report.plain import error_words, name_of
from gradveil.threats.rows import OBLIVIOUS, Floor, Line, MeasuredExample, best_floor, group, modality_of, read
from gradveil.threats.verdict import (
    BEYOND,
    DIAGNOSTIC,
    WHO,
    TierVerdict,
    Verdict,
    badges,
    by,
    by_tier,
    got,
    oblivious_and_adaptive,
    server_name,
)


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


def pictures(gallery: Gallery, rows: Sequence[Row], found: Sequence[Line]) -> list[dict[str, Any]]:
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
        result.append({"round": round_, "number": number, "shown": [*head, *shown], "rest": rest})
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


def column_table(store: RunFolder, found: Sequence[Line]) -> dict[str, Any] | None:
    """Return a line for each column of the data, of the first round; nothing where there are none, or no truth."""
    kind, floor, truth = modality_of(store.rows), best_floor(store.rows), store.arrays(TRUTH)
    if not kind.heads or floor is None or "truth" not in truth or not found:
        return None
    here = [line for line in found if line.round == found[0].round]
    by_line = group([m for m in read(store.rows, "attack") if m.round == found[0].round], *KEY)
    guessed = [m for m in read(store.rows, "floor") if m.guess == floor.guess]
    shown = {f"blind guess: {floor.guess}": _cells(kind, truth["truth"], guessed, [truth[floor.guess]] * len(guessed))}
    for defense in dict.fromkeys(line.defense for line in here):
        oblivious, adaptive = oblivious_and_adaptive(here, defense)
        line = adaptive or oblivious
        if line is not None:
            mine = by_line[line.key]
            arrays = [store.arrays(m.unit)["found"] for m in mine]
            shown[f"{defense} ({line.attack.partition(':')[0]})"] = _cells(kind, truth["truth"], mine, arrays)
    rows = [(name, [_said([row[c] for row in its]) for its in shown.values()]) for c, name in enumerate(kind.heads)]
    return {"round": found[0].round, "heads": list(shown), "rows": rows}


def _cells(
    kind: Modality, truth: NDArray[Any], mine: Sequence[MeasuredExample], arrays: Sequence[NDArray[Any]]
) -> list[list[Cell]]:
    """Return the cells of each example found; a guess lies in the place of its example, an attack's in its own."""
    places = [m.index if m.attack else m.example for m in mine]
    pairs = [(x[place], truth[m.example]) for m, x, place in zip(mine, arrays, places, strict=True)]
    return [kind.cells(torch.from_numpy(x), torch.from_numpy(true)) or [] for x, true in pairs]


def _said(cells: Sequence[Cell]) -> str:
    off = [cell.off for cell in cells if cell.off is not None]
    said = rate([float(bool(cell.right)) for cell in cells]).as_count
    return f"{said} ±{short(sum(off) / len(off))}" if off else said


def film_strips(gallery: Gallery, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the films of a run: where an attack on one update stood after some steps, and its answer."""
    kept = gallery.arrays(FILM)
    strips = []
    for place, row in enumerate(row for row in rows if row["kind"] == "film" and row["steps"]):
        labels = [*(f"step {step}" for step in row["steps"][:-1]), "answer"]
        alts = [
            f"{label}: {gallery.kind.error_name} {short(e)}" for label, e in zip(labels, row["errors"], strict=True)
        ]
        shots = [
            Shot(picture(x), alt, f"{error:.1g}", example=row["example"])
            for x, alt, error in zip(kept[str(place)], alts, row["errors"], strict=True)
        ]
        server = "oblivious server" if row["tier"] == "oblivious" else f"server that knows ({row['server']})"
        how = row["attack"] if row["defense"] == "none" else f"{server}, {row['attack']}"
        strips.append({"spec": row["defense"], "how": how, "frames": list(zip(labels, shots, strict=True))})
    return strips


@dataclass(frozen=True)
class ServerOnCard:
    """One server on a card."""

    who: str
    outcome: str
    says: str  # in words
    numbers: str  # the same, with intervals
    shots: list[Shot]  # of the typical example and of the worst, where it attacked them


@dataclass(frozen=True)
class Card:
    """One defence: its verdict, what it costs, and its examples."""

    verdict: Verdict
    cost: str
    originals: list[Shot]  # the typical example and the worst
    servers: list[ServerOnCard]

    @property
    def main(self) -> ServerOnCard | None:
        """The server that its verdict is by: the one that knows the defence, where it was tried."""
        return next((s for s in reversed(self.servers[:2]) if s.shots), None)

    @property
    def has_pictures(self) -> bool:
        """Whether its examples can be looked at."""
        return bool(self.originals and self.originals[0].src)


Attacked = dict[tuple[object, ...], list[MeasuredExample]]  # by round and line


def cards(gallery: Gallery, rows: Sequence[Row], judged: Sequence[Verdict]) -> list[Card]:
    """Return a card for each defence."""
    floor, attacked = best_floor(rows), group(read(rows, "attack"), "round", *KEY)
    return [] if floor is None else [_card(v, floor, gallery, attacked) for v in judged]


def _card(verdict: Verdict, floor: Floor, gallery: Gallery, attacked: Attacked) -> Card:
    chosen = typical_and_worst(_its(verdict.adaptive or verdict.oblivious, attacked))
    is_plain = verdict.defense == "none"
    servers = []
    for t in verdict.tiers:
        if is_plain and t.tier != "oblivious" and not (t.line and t.tier in BEYOND):
            continue
        its = {m.example: m for m in _its(_own_line(t), attacked)}
        shots = [gallery.found(its[number]) for number in chosen if number in its]
        who = "Any server" if is_plain and t.tier == "oblivious" else WHO[t.tier]
        servers.append(ServerOnCard(who, t.outcome, _says(t, floor), _numbers(t, floor), shots))
    cost = f"{verdict.scored_by[:1].upper()}{verdict.scored_by[1:]}: {verdict.score}" if verdict.score else ""
    return Card(verdict, cost, [gallery.original(number) for number in chosen], servers)


def typical_and_worst(mine: Sequence[MeasuredExample]) -> list[int]:
    """Return the example whose error is the median one (of two the lower), and the one that came back best."""
    ordered = sorted((m.error, m.example) for m in mine if m.known)
    return [ordered[(len(ordered) - 1) // 2][1], ordered[0][1]] if ordered else []


def _its(line: Line | None, attacked: Attacked) -> list[MeasuredExample]:
    return [] if line is None else attacked.get((line.round, *line.key), [])


def _own_line(tier: TierVerdict) -> Line | None:
    """Return the line that a tier's verdict is by, unless it only says that such a server can do what others do."""
    line = tier.line
    return line if line is not None and (line.tier == tier.tier or tier.tier == "adaptive") else None


def _says(tier: TierVerdict, floor: Floor) -> str:
    line = tier.line
    if line is None or not line.counts or tier.outcome == "not_assessed":
        return tier.text
    said = got(line, floor, tier.tier)
    if _own_line(tier) is None:
        return said
    typical, worst = error_words(line.error.mean, floor), error_words(line.worst, floor)
    return f"{said}, {typical}" + (f"; the worst {floor.modality.one}: {worst}" if worst != typical else "")


def _numbers(tier: TierVerdict, floor: Floor) -> str:
    line = _own_line(tier)
    if line is None:
        return ""
    parts = [f"{floor.modality.error_name} {line.error}", f"blind guess {short(floor.error.mean)}"]
    if line.identified.count:
        parts.append(f"identified {line.identified.as_count}")
    where = f"{line.round} round" if line.round != "update" else "the update"
    return f"{', '.join(parts)}; {by(line)}, {where}"
