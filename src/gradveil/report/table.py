"""All numbers as a table, for the page and for the terminal."""

import math
from collections.abc import Sequence

from gradveil.experiments.summary import NAIVE, Floor, Line
from gradveil.experiments.verdict import BADGES, short
from gradveil.metrics.intervals import Interval

HEAD = (
    "round",
    "defence",
    "server",
    "attack",
    "MSE",
    "PSNR dB",
    "SSIM",
    "FFT",
    "identified",
    "recovered",
    "labels",
    "says",
)
NUM_TEXTS = 4  # columns of text before the numbers


def table_rows(found: Sequence[Line], floor: Floor) -> list[tuple[str, ...]]:
    """Return the blind guess and every line as texts, in the order of ``HEAD``."""
    blind = (
        "",
        "(blind guess)",
        "",
        floor.guess,
        spread(floor.mse),
        *[""] * 3,
        share(floor.identified),
        "",
        "",
        "the floor",
    )
    return [blind, *(_row(line) for line in found)]


def _row(line: Line) -> tuple[str, ...]:
    defense = line.defense
    if defense == "none" and line.weights not in ("none", "start"):
        defense = f"none (model of {line.weights})"
    return (
        line.round,
        defense,
        line.server if line.defense != "none" else "–",
        line.attack,
        spread(line.mse),
        spread(line.psnr, ".1f"),
        spread(line.ssim, ".2f"),
        spread(line.fft),
        share(line.identified),
        share(line.recovered),
        share(line.label),
        says(line),
    )


def says(line: Line) -> str:
    """Return what a line amounts to."""
    if not line.counts:
        return f"Void: {line.void}."
    is_control = line.defense == "none" and line.server == NAIVE
    return f"{'Control: ' if is_control else ''}{BADGES[line.grade]}."


def spread(value: Interval, form: str = ".2g") -> str:
    """Return a mean with its interval."""
    if not value.count or math.isnan(value.mean):
        return "–"
    mean, low, high = (short(v) if form == ".2g" else f"{v:{form}}" for v in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def share(value: Interval) -> str:
    """Return a share as a count, with its interval in percent."""
    if not value.count:
        return "–"
    return f"{round(value.mean * value.count)}/{value.count} [{value.low:.0%}, {value.high:.0%}]"
