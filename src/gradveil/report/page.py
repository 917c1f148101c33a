"""One run folder -> one HTML page that needs nothing else: no font, no request; the script in it only adds comfort.

What is drawn and said lies in ``templates``; here is what they are filled with, the axes of the figures among it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.auditing.gate import left_out
from gradveil.auditing.run_folder import REPORT, ROUNDS, ROWS, FolderError, Row, RunFolder
from gradveil.errors import MissingExtraError
from gradveil.files import wrap_parse_errors, write_atomically
from gradveil.report.advice import advice, change_table, tiers_tried, verdict_sentence
from gradveil.report.pictures import Gallery, cards, column_table, film_strips, pictures
from gradveil.report.plain import name_of
from gradveil.report.rounds import rounds_content
from gradveil.report.table import NUM_TEXTS, certificate_table, head, table_rows
from gradveil.threats.rows import (
    HALF,
    RECOVERED,
    SIGNIFICANT,
    Floor,
    Line,
    best_floor,
    figure_errors,
    lines,
    modality_of,
)
from gradveil.threats.verdict import (
    UNDETECTABLE,
    Verdict,
    badges,
    declaration_errors,
    headline,
    oblivious_and_adaptive,
    score_text,
    server_name,
    verdicts,
)

NOT_AN_AUDIT = "It is no audit, or its rows were damaged: take them from a copy, or audit again."


def write_report(folder: str | Path) -> Path:
    """Draw the page of a run folder, and return where it is. A pure function of the folder's data."""
    with RunFolder.open(folder).hold() as store, wrap_parse_errors(Path(folder) / ROWS, FolderError, NOT_AN_AUDIT):
        return draw(store)


def draw(store: RunFolder) -> Path:
    """Draw the page of a run that is held, as far as it is."""
    path = store.path / REPORT
    write_atomically(path, render(store).encode())
    return path


def render(store: RunFolder) -> str:
    """Return the page of a run as text."""
    if not store.rows and (store.path / ROUNDS).exists():
        return fill("rounds.html", rounds_content(store))
    return fill("page.html", _content(store))


def fill(template: str, content: dict[str, Any]) -> str:
    """Return a template filled in, with the style sheet and the script."""
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
    except ImportError as error:
        raise MissingExtraError("The HTML report", "report") from error
    parts = {one.name: one.read_text("utf-8") for one in (files("gradveil.report") / "templates").iterdir()}
    made = Environment(autoescape=True, trim_blocks=True, loader=DictLoader(parts), undefined=StrictUndefined)
    made.globals |= {"name_of": name_of, "server_name": server_name, "score_text": score_text}
    made.globals |= {"number": number, "width": WIDTH, "style": parts["page.css"], "script": parts["page.js"]}
    return made.get_template(template).render(content)


def _content(store: RunFolder) -> dict[str, Any]:
    config, versions, rows = store.settings, store.versions, store.rows
    modality, floor, found, judged = modality_of(rows), best_floor(rows), lines(rows), verdicts(rows)
    gallery = Gallery(store)
    servers = [(f"{row['defense']} · {row['server']}", row["why"]) for row in rows if row["kind"] == "defense"]
    limits = {"half": HALF, "recovered": RECOVERED, "significant": SIGNIFICANT}
    return {
        "config": config,
        "versions": versions,
        "settings": [*_of_rows(rows), *config.items(), *versions.items()],
        "single": "update" in config,
        "schedule": next((row["schedule"] for row in rows if row["kind"] == "client"), "one local step"),
        "kind": modality,
        "floor": floor,
        "errors": declaration_errors(rows) + figure_errors(rows),
        "verdict": verdict_sentence(judged, modality),
        "headline": headline(rows),
        "tried": tiers_tried(judged),
        "advice": advice(judged, config, rows),
        "changes": change_table(rows),
        "late": sum(row["kind"] == "skip" and bool(row.get("out_of_time")) for row in rows),
        "left_out": left_out(rows),
        "badges": badges(modality),
        "undetectable": UNDETECTABLE,
        "cards": cards(gallery, rows, judged),
        "films": film_strips(gallery, rows),
        "pictures": pictures(gallery, rows, found),
        "columns": column_table(store, found),
        "figures": round_figures(found, judged, floor) if floor is not None else [],
        "scored_by": judged[0].scored_by if judged else "accuracy",
        "table": floor and {"head": head(modality), "texts": NUM_TEXTS, "rows": table_rows(found, floor)},
        "certificates": certificate_table(rows),
        "servers": list(dict.fromkeys(servers)),
        "limits": {name: f"{limit:.0%}" for name, limit in limits.items()},
    }


def _of_rows(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what became black and white of images of more than eight bits, and rows that other versions made."""
    found = next((row for row in rows if row["kind"] == "levels"), None)
    told = "images of more than 8 bits: the lowest value {black:g} is black, the highest {white:g} white, in 256 levels"
    levels = [("levels", told.format(**found))] if found else []
    others = [", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in rows if row.get("versions")]
    return levels + [("made by others", f"{others.count(one)} rows: {one}") for one in dict.fromkeys(others)]


WIDTH = 400  # in units of about one CSS pixel on a phone


@dataclass(frozen=True)
class Axis:
    """From values to places along an axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value, kept within the axis."""
        low, high, x = (math.log10(v) for v in (self.low, self.high, max(value, self.low))) if self.log else (
            self.low, self.high, value,
        )  # fmt: skip
        share = min(1.0, max(0.0, (x - low) / (high - low)))
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Return a few round values on the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low) + 0.5), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, math.ceil((last - first + 1) / 6))
            return [10.0**k for k in range(first, last + 1, every)]
        raw = (self.high - self.low) / 4
        step = next(s for s in (m * 10 ** math.floor(math.log10(raw)) for m in (1, 2, 5, 10)) if s >= raw)
        first = math.ceil(self.low / step - 1e-9)
        return [round(k * step, 10) for k in range(first, math.floor(self.high / step + 1e-9) + 1)]


def log_scale(values: Iterable[float], start: float, end: float, smallest: float = 1e-10) -> Axis:
    """Return a logarithmic scale over whole decades that holds all values; under 1e-10 they lie at its end."""
    kept = [max(v, smallest) for v in values if math.isfinite(v)] or [1.0]
    low, high = math.floor(math.log10(min(kept))), math.ceil(math.log10(max(kept)) + 1e-9)
    return Axis(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)


def linear_scale(values: Iterable[float], start: float, end: float, least: float = 0.1) -> Axis:
    """Return a linear scale with some room on both sides, at least ``least`` wide, within [0, 1]."""
    kept = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    middle, half = (min(kept) + max(kept)) / 2, max((max(kept) - min(kept)) * 0.7, least / 2)
    low = max(0.0, middle - half)
    high = min(1.0, middle + half)
    return Axis(low, max(high, low + least / 2), start, end)


def number(value: float) -> str:
    """Return a tick's text."""
    if value != 0 and (abs(value) < 0.001 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.0e}".split("e")
        power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return f"10{power}" if mantissa == "1" else f"{mantissa}·10{power}"
    return f"{value:g}"


@dataclass(frozen=True)
class Mark:
    """What is drawn of one defence."""

    place: int
    verdict: Verdict
    oblivious: Line | None
    adaptive: Line | None

    @property
    def lines(self) -> list[Line]:
        """The strongest attacks, where there are any."""
        return [line for line in (self.oblivious, self.adaptive) if line is not None]


@dataclass(frozen=True)
class RoundFigures:
    """The figures of one round: the error of each defence, and privacy against accuracy where that was measured."""

    round: str
    marks: list[Mark]
    control: Line | None
    blind: float
    error: Axis
    score: Axis
    privacy: Axis

    @property
    def scored(self) -> list[Mark]:
        """The marks of the second figure; none where no attack on them was measured."""
        mine = [mark for mark in self.marks if mark.verdict.accuracy is not None]
        return mine if any(mark.lines for mark in mine) else []


def round_figures(found: Sequence[Line], judged: Sequence[Verdict], floor: Floor) -> list[RoundFigures]:
    """Return the figures of every round."""
    scale = linear_scale if floor.modality.is_share else log_scale
    blind = floor.error.mean
    figures = []
    for round_ in dict.fromkeys(line.round for line in found):
        here = [line for line in found if line.round == round_]
        marks = [Mark(i, v, *oblivious_and_adaptive(here, v.defense)) for i, v in enumerate(judged)]
        scores = {mark.place: mark.verdict.accuracy for mark in marks if mark.verdict.accuracy is not None}
        errors = [line.error for mark in marks for line in mark.lines]
        means = [line.error.mean for mark in marks for line in mark.lines if mark.place in scores]
        ends = [end for error in errors for end in (error.low, error.high)]
        axes = (
            scale([blind, *ends], 12, WIDTH - 12),
            linear_scale(scores.values(), 54, WIDTH - 22),
            scale([blind, *means], 236, 16),
        )
        if errors:
            figures.append(RoundFigures(round_, marks, oblivious_and_adaptive(here, "none")[0], blind, *axes))
    return figures
