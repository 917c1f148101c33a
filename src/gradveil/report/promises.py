"""What can be promised, as a table: certificates and the leak meter beside the attacks, with what they rest on."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.experiments.store import Row
from gradveil.experiments.verdict import short

HEAD = ("defence", "figure", "MSE at least", "proved", "says")
NAMES = {
    "local": "the paper's theorem 1",
    "global": "the Lipschitz bound",
}


@dataclass(frozen=True)
class Promises:
    """The table and the sentences under it."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    assumptions: list[tuple[str, list[str]]]  # figure -> sentences


def promises_table(rows: Sequence[Row]) -> Promises | None:
    """Return the table, or nothing where the run has no such rows."""
    chosen = [row for row in rows if row["kind"] in ("certificate", "meter")]
    if not chosen:
        return None
    assumptions: dict[str, list[str]] = {}
    for row in chosen:
        known = assumptions.setdefault(_figure(row), [])
        known += [text for text in row["assumptions"] if text not in known]
    cells = [(row["defense"], _name(row), _mse(row), _proved(row), row["says"]) for row in chosen]
    return Promises(HEAD, cells, [(figure, texts) for figure, texts in assumptions.items() if texts])


def _figure(row: Row) -> str:
    return "the leak meter" if row["kind"] == "meter" else NAMES[row["certificate"]]


def _name(row: Row) -> str:
    where = row["server"] if row["kind"] == "meter" else row["layer"]
    return f"{_figure(row)} ({where})" if where else _figure(row)


def _mse(row: Row) -> str:
    return "–" if row["mse"] is None else short(row["mse"])


def _proved(row: Row) -> str:
    if row["kind"] == "meter":
        return "first order"
    return "yes" if row["sound"] else "first order"
