"""The attack step by step, as strips of pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gradveil.auditing.film import FILM
from gradveil.auditing.run_folder import Row
from gradveil.metrics.recovery import short
from gradveil.report.pictures import Gallery, Shot, picture
from gradveil.report.plain import name_of


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
