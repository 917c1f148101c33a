"""The cards: what each server gets of each defence, in words, with intervals, a typical example and the worst."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from gradveil.auditing.film import FILM
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.metrics import rate, short
from gradveil.modalities import Cell, Modality
from gradveil.report.pictures import KEY, TRUTH, Gallery, Shot, picture
from gradveil.report.plain import error_words, name_of
from gradveil.threats.rows import Floor, Line, MeasuredExample, Proved, best_floor, group, modality_of, read
from gradveil.threats.verdict import BEYOND, WHO, TierVerdict, Verdict, accuracy_text, by, got, oblivious_and_adaptive


@dataclass(frozen=True)
class ColumnTable:
    """The table: a line for each column of the data."""

    round: str
    heads: list[str]
    rows: list[tuple[str, list[str]]]


def column_table(store: RunFolder, found: Sequence[Line]) -> ColumnTable | None:
    """Return the table of the first round looked at; nothing where examples have no columns, or no truth."""
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
    return ColumnTable(found[0].round, list(shown), rows)


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


@dataclass(frozen=True)
class FilmStrip:
    """One attack on one update."""

    what: str
    how: str
    spec: str
    frames: list[tuple[str, Shot]]  # the step, and where the attack stood after it


def film_strips(gallery: Gallery, rows: Sequence[Row]) -> list[FilmStrip]:
    """Return the films of a run."""
    kept = gallery.arrays(FILM)
    mine = [row for row in rows if row["kind"] == "film" and row["steps"]]
    return [_strip(row, kept[str(place)], gallery) for place, row in enumerate(mine)]


def _strip(row: Row, frames: NDArray[Any], gallery: Gallery) -> FilmStrip:
    server = {"oblivious": "oblivious server"}.get(row["tier"], f"server that knows ({row['server']})")
    undefended = row["defense"] == "none"
    labels = [f"step {step}" for step in row["steps"][:-1]] + ["answer"]
    shots = [
        Shot(picture(x), f"{label}: {gallery.kind.error_name} {short(error)}", f"{error:.1g}", example=row["example"])
        for label, x, error in zip(labels, frames, row["errors"], strict=True)
    ]
    how = row["attack"] if undefended else f"{server}, {row['attack']}"
    return FilmStrip(name_of(row["defense"]), how, row["defense"], list(zip(labels, shots, strict=True)))


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
    """One defence."""

    spec: str
    name: str
    outcome: str
    errors: tuple[str, ...]
    found: str  # what the strongest attack of any tier got
    proved: Proved
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


def cards(gallery: Gallery, rows: Sequence[Row], judged: Sequence[Verdict]) -> list[Card]:
    """Return a card for each defence."""
    floor = best_floor(rows)
    if floor is None:
        return []
    attacked = group(read(rows, "attack"), "round", *KEY)
    return [_card(v, floor, gallery, attacked) for v in judged]


Attacked = dict[tuple[object, ...], list[MeasuredExample]]  # by round and line


def _card(verdict: Verdict, floor: Floor, gallery: Gallery, attacked: Attacked) -> Card:
    main = verdict.adaptive or verdict.oblivious
    chosen = typical_and_worst(_its(main, attacked))
    is_plain = verdict.defense == "none"
    shown = [t for t in verdict.tiers if not is_plain or t.tier == "oblivious" or (t.line and t.tier in BEYOND)]
    servers = []
    for t in shown:
        its = {m.example: m for m in _its(_own_line(t), attacked)}
        shots = [gallery.found(its[number]) for number in chosen if number in its]
        who = "Any server" if is_plain and t.tier == "oblivious" else WHO[t.tier]
        servers.append(ServerOnCard(who, t.outcome, _says(t, floor), _numbers(t, floor), shots))
    accuracy = {verdict.defense: verdict.accuracy, "none": verdict.baseline}
    known = {name: value for name, value in accuracy.items() if value is not None}
    scored_by = verdict.scored_by
    cost = f"{scored_by}: {accuracy_text(verdict.defense, known, scored_by)}" if verdict.defense in known else ""
    originals = [gallery.original(number) for number in chosen]
    name = name_of(verdict.defense)
    return Card(
        verdict.defense,
        name,
        verdict.outcome,
        verdict.errors,
        verdict.found,
        verdict.proved,
        cost[:1].upper() + cost[1:],
        originals,
        servers,
    )


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
