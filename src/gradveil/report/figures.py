"""The page's figures: what each round's are drawn from, which ``templates/figures.html`` does."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradveil.threats.rows import Floor, Line
from gradveil.threats.verdict import Verdict, oblivious_and_adaptive

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
