"""What the page explains: one line per term, the rules as they are applied."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.experiments.rows import HALF, RECOVERED, SIGNIFICANT
from gradveil.experiments.run_folder import Row
from gradveil.metrics.intervals import short

READING = (
    (
        "Naive server",
        "Matches everything that arrives, as if there were no defence. It is what most published tables show.",
    ),
    (
        "Server that knows",
        "Has read the defence's code, as any server may (Kerckhoffs), and works around it. Only the client's data "
        "and its random draws are secret. This is the figure that counts.",
    ),
    (
        "Control",
        "The same attack on the same images and weights with no defence: the ceiling. If it fails, the attack's "
        "failure against a defence proves nothing.",
    ),
    (
        "Void",
        f"An attack whose control recovers fewer than {HALF:.0%} of the images and identifies fewer than {HALF:.0%}. "
        "A void line is never counted as protection; what it does recover still counts as a leak.",
    ),
    (
        "Blind guess",
        "What somebody who never saw the update would answer: plain grey, the mean of public images, or that of the "
        "right class. The best of them is the floor: an attack above it has learned nothing.",
    ),
    (
        "Recovered",
        f"At least {HALF:.0%} of the images come back with an error under {RECOVERED:.0%} of the blind guess's.",
    ),
    (
        "Identified",
        "The reconstruction is nearer to its original than to every other image of the gallery (ties count against "
        "the attack): what privacy means to a person. Recognised: at least "
        f"{HALF:.0%} of the images are identified.",
    ),
    (
        "Traces",
        "Some image was recovered, or more were identified than chance explains (binomial test at "
        f"{SIGNIFICANT:.0%}), or the mean error is under {HALF:.0%} of the blind guess's.",
    ),
    (
        "Nothing found",
        "None of the attacks of this panel got anything, and their controls succeeded. That is evidence, not proof.",
    ),
    (
        "Error",
        "Mean squared error per pixel, pixels in [0, 1], after clamping to the data range: a diverged attack cannot "
        "look like protection. Reconstructions are chosen by the attack's own objective, never by the truth.",
    ),
)

PICTURES = (
    "Under each picture: its mean squared error; ✓ and red where it picks its original out of the gallery. "
    "Shown first: the strongest attack of the naive server and of the server that knows each defence."
)

CAVEAT = (
    "Each attacked client took one local step from the weights that the server sent; pictures on the cards show the "
    "first image, not the best one. What no attack of this panel got, another may still get."
)


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
