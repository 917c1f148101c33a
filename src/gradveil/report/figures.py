"""The page's figures, drawn as SVG: the error per defence, and privacy against accuracy."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from gradveil.modalities import Modality
from gradveil.report.plain import name_of
from gradveil.threats.rows import OBLIVIOUS, Floor, Line
from gradveil.threats.verdict import Verdict, oblivious_and_adaptive, score_text, server_name


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
class FigureTable:
    """The numbers that a figure shows."""

    heads: list[str]
    rows: list[list[str]]


WIDTH = 400  # in units of about one CSS pixel on a phone
NUM_STYLES = 8  # colours in the style sheet


def errors_figure(found: Sequence[Line], names: Sequence[str], floor: Floor, round_: str) -> str:
    """Draw the error of the strongest oblivious and adaptive attack per defence, with intervals."""
    here = [line for line in found if line.round == round_]
    pairs = [(name, *oblivious_and_adaptive(here, name)) for name in names]
    shown = [line for _, oblivious, adaptive in pairs for line in (oblivious, adaptive) if line is not None]
    if not shown:
        return ""
    left, right, top, step = 12, WIDTH - 12, 34, 46
    bottom = top + step * len(pairs)
    kind = floor.modality
    ends = [floor.error.mean, *(v for line in shown for v in (line.error.low, line.error.high))]
    scale = _error_scale(kind, ends, left, right)
    parts = [_vertical(scale, t, top, bottom, "grid", number(t), bottom + 14) for t in scale.ticks()]
    parts.append(_reference_lines(scale, top, bottom, floor, _control(here)))
    for i, (name, oblivious, adaptive) in enumerate(pairs):
        y = top + step * i + 14
        parts.append(_name(left, y, name))
        parts.append(_whisker(scale, oblivious, y + 11, i, "hollow", kind))
        parts.append(_whisker(scale, adaptive, y + 22, i, "full", kind))
    parts.append(f'<text x="{right}" y="{bottom + 30}" class="axis" text-anchor="end">{_axis(kind)} →</text>')
    return _svg(bottom + 36, f"Error of the strongest attack on each defence, {round_} round", parts)


def trade_figure(found: Sequence[Line], judged: Sequence[Verdict], floor: Floor, round_: str) -> str:
    """Draw privacy against accuracy: a defence's oblivious and adaptive marks are joined by a line."""
    here = [line for line in found if line.round == round_]
    marks = [(i, v, *oblivious_and_adaptive(here, v.defense)) for i, v in enumerate(judged) if v.accuracy is not None]
    shown = [line.error.mean for *_, oblivious, adaptive in marks for line in (oblivious, adaptive) if line is not None]
    if not shown:
        return ""
    left, right, top, bottom = 44, WIDTH - 12, 16, 236
    x = linear_scale([v.accuracy for _, v, *_ in marks if v.accuracy is not None], left + 10, right - 10)
    y = _error_scale(floor.modality, [floor.error.mean, *shown], bottom, top)
    scored_by = judged[0].scored_by
    parts = [_horizontal(y, t, left, right, "grid", number(t)) for t in y.ticks()]
    as_text = "{:.0%}" if scored_by == "accuracy" else "{:.3g}"
    parts += [_vertical(x, t, top, bottom, "grid", as_text.format(t), bottom + 14) for t in x.ticks()]
    control = _control(here)
    for kind, text, value in (("floor", "blind guess", floor.error.mean), ("control", "control", _mean(control))):
        if value is not None:
            parts.append(_horizontal(y, value, left, right, kind))
            parts.append(f'<text x="{right}" y="{y(value) - 4}" class="tick" text-anchor="end">{text}</text>')
    for i, judged_one, oblivious, adaptive in marks:
        place = x(judged_one.accuracy or 0.0)
        both = ((oblivious, "hollow"), (adaptive, "full"))
        ends = [(line, kind if line.counts else "void") for line, kind in both if line is not None]
        if len(ends) == 2:
            heights = [y(line.error.mean) for line, _ in ends]
            parts.append(
                f'<path d="M{place} {heights[0]}V{heights[1]}" class="s{i % NUM_STYLES} joint" data-series="{i}"/>'
            )
        parts += [_mark(place, y(line.error.mean), i, kind, _told(line, floor.modality)) for line, kind in ends]
    legend = bottom + 50
    for k, (i, judged_one, *_rest) in enumerate(marks):
        y_here = legend + 17 * k
        text = _mark(left + 6, y_here, i, "full", "") + _name(left + 18, y_here + 4, judged_one.defense)
        parts.append(f'<g class="legend" data-legend="{i}">{text}</g>')
    parts.append(f'<text x="{right}" y="{bottom + 30}" class="axis" text-anchor="end">{scored_by} →</text>')
    parts.append(f'<text x="4" y="{top - 5}" class="axis">{_axis(floor.modality, " of the attack")} ↑</text>')
    return _svg(legend + 17 * len(marks), f"Privacy against {scored_by}, {round_} round", parts)


def figure_table(found: Sequence[Line], judged: Sequence[Verdict], floor: Floor, round_: str) -> FigureTable:
    """Return the numbers behind the figures of a round."""
    here = [line for line in found if line.round == round_]
    rows = []
    for v in judged:
        score = "–" if v.accuracy is None else score_text(v.accuracy, v.scored_by)
        for line in oblivious_and_adaptive(here, v.defense):
            if line is not None:
                said = [name_of(v.defense), _server(line), line.attack, str(line.error), line.identified.as_count]
                rows.append([*said, "yes" if not line.counts else "", score])
    heads = ["defence", "server", "attack", floor.modality.error_name, "identified", "void"]
    return FigureTable([*heads, judged[0].scored_by if judged else "accuracy"], rows)


def _error_scale(modality: Modality, values: Sequence[float], start: float, end: float) -> Axis:
    return (linear_scale if modality.is_share else log_scale)(values, start, end)


def _axis(modality: Modality, of: str = "") -> str:
    return f"{modality.error_axis}{of}{'' if modality.is_share else ' (log)'}"


def _control(here: Sequence[Line]) -> Line | None:
    return oblivious_and_adaptive(here, "none")[0]


def _mean(line: Line | None) -> float | None:
    return None if line is None else line.error.mean


def _server(line: Line) -> str:
    return "oblivious server" if line.server == OBLIVIOUS else f"server that knows ({server_name(line)})"


def _told(line: Line, modality: Modality) -> str:
    void = "; void" if not line.counts else ""
    said = f"{name_of(line.defense)}: {_server(line)}, {line.attack}, {modality.error_name} {line.error}"
    return f"{said}, identified {line.identified.as_count}{void}"


def _name(x: float, y: float, spec: str) -> str:
    return f'<text x="{x}" y="{y}" class="name">{escape(name_of(spec))}<title>{escape(spec)}</title></text>'


def _whisker(scale: Axis, line: Line | None, y: float, i: int, kind: str, modality: Modality) -> str:
    if line is None:
        return ""
    low, high = scale(line.error.low), scale(line.error.high)
    whisker = f'<path d="M{low} {y}H{high}" class="s{i % NUM_STYLES} joint" data-series="{i}"/>'
    return whisker + _mark(scale(line.error.mean), y, i, kind if line.counts else "void", _told(line, modality))


def _mark(x: float, y: float, i: int, kind: str, title: str) -> str:
    """Draw a mark whose shape and colour belong to the defence: neither alone has to tell them apart."""
    shapes = (
        "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
        "M-4 -4h8v8h-8z",
        "M0 -5.2L5 4H-5z",
        "M0 -5.6L5.6 0L0 5.6L-5.6 0z",
        "M0 5.2L5 -4H-5z",
        "M-5 -1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3z",
    )
    inside = f"<title>{escape(title)}</title>" if title else ""
    more = f' data-series="{i}" tabindex="0" role="img" aria-label="{escape(title)}"' if title else ""
    shape = shapes[i % len(shapes)]
    place = f'transform="translate({x} {y})" d="{shape}"'
    return f'<path {place} class="s{i % NUM_STYLES} {kind}"{more}>{inside}</path>'


def _reference_lines(scale: Axis, top: float, bottom: float, floor: Floor, control: Line | None) -> str:
    parts = [_vertical(scale, floor.error.mean, top, bottom, "floor", "blind guess", top - 20)]
    if control is not None:
        parts.append(_vertical(scale, control.error.mean, top, bottom, "control", "control", top - 8))
    return "".join(parts)


def _vertical(scale: Axis, value: float, top: float, bottom: float, kind: str, text: str, text_y: float) -> str:
    x = scale(value)
    anchor = "start" if x < 60 else "end" if x > WIDTH - 60 else "middle"
    label = f'<text x="{x}" y="{text_y}" class="tick" text-anchor="{anchor}">{escape(text)}</text>'
    return f'<path d="M{x} {top}V{bottom}" class="{kind}"/>{label}'


def _horizontal(scale: Axis, value: float, left: float, right: float, kind: str, text: str = "") -> str:
    y = scale(value)
    label = f'<text x="{left - 4}" y="{y + 4}" class="tick" text-anchor="end">{escape(text)}</text>' if text else ""
    return f'<path d="M{left} {y}H{right}" class="{kind}"/>{label}'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="group" aria-label="{escape(title)}">{"".join(parts)}</svg>'
