"""All numbers as a table, for the page and for the terminal."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradveil.auditing.run_folder import Row
from gradveil.metrics import short
from gradveil.modalities import IMAGE, Metric, Modality
from gradveil.threats.rows import PROVED, Floor, Line, beaten_by, beaten_figures, figure_name
from gradveil.threats.verdict import BEYOND, DIAGNOSTIC, Verdict, badges, by, score_text, server_name

NUM_TEXTS = 4  # columns of text before the numbers


def head(modality: Modality) -> tuple[str, ...]:
    """Return the heads of the columns; what a modality measures beside its error comes after that."""
    others = (metric.title for metric in _others(modality))
    numbers = (modality.error_name, "worst record", *others, "identified", "recovered", "labels")
    return ("round", "defence", "server", "attack", *numbers, "says")


def _others(modality: Modality) -> list[Metric]:
    return [metric for name, metric in modality.metrics.items() if name != modality.error]


def table_rows(found: Sequence[Line], floor: Floor) -> list[tuple[str, ...]]:
    """Return the blind guess and every line as texts, in the order of ``head``."""
    blind = (
        "",
        "(blind guess)",
        "",
        floor.guess,
        str(floor.error),
        short(min(floor.by_example.values())),
        *[""] * len(_others(floor.modality)),
        floor.identified.as_count,
        "",
        "",
        "the floor",
    )
    return [blind, *(_row(line, floor.modality) for line in found)]


def _row(line: Line, modality: Modality) -> tuple[str, ...]:
    defense = line.defense
    if not line.at_own_weights:
        defense = f"none ({line.weights})" if line.weights == DIAGNOSTIC else f"none (model of {line.weights})"
    return (
        line.round,
        defense,
        server_name(line) if line.defense != "none" or line.tier != "oblivious" else "–",
        line.attack,
        str(line.error),
        short(line.worst),
        *(f"{line.metric(m.name):{m.form}}" for m in _others(modality)),
        line.identified.as_count,
        line.recovered.as_count,
        line.label.as_count,
        says(line, modality),
    )


def says(line: Line, modality: Modality) -> str:
    """Return what a line amounts to."""
    if not line.counts:
        return f"Void: {line.void}."
    is_control = line.defense == "none"
    return f"{'Control: ' if is_control else ''}{badges(modality)[line.grade]}."


@dataclass(frozen=True)
class CertificateTable:
    """The table and the sentences under it."""

    rows: Sequence[tuple[str, ...]]  # defence, figure, the least MSE, whether it is proved, what it says
    assumptions: dict[str, list[str]]  # figure -> sentences


def certificate_table(rows: Sequence[Row]) -> CertificateTable | None:
    """Return the table, or nothing where the run is none of a federation and has no such rows."""
    chosen = [row for row in rows if row["kind"] in ("certificate", "meter")]
    trained = dict.fromkeys(row["defense"] for row in rows if row["kind"] == "accuracy")
    missing: Row = {"kind": "meter", "server": "", "mse": None, "assumptions": [], "says": "Not run."}
    chosen += [missing | {"defense": name} for name in trained if name not in {row["defense"] for row in chosen}]
    if not chosen:
        return None
    assumptions: dict[str, list[str]] = {}
    for row in chosen:
        known = assumptions.setdefault(figure_name(row), [])
        known += [text for text in row["assumptions"] if text not in known]
    beaten = {id(row): line for row, line in beaten_figures(rows)}
    return CertificateTable([_cells(row, beaten.get(id(row))) for row in chosen], assumptions)


def _cells(row: Row, beaten: Line | None) -> tuple[str, ...]:
    """Return a line of the table; a figure that an attack beat is not shown as one."""
    where = row["server"] if row["kind"] == "meter" else row["layer"]
    name = f"{figure_name(row)} ({where})" if where else figure_name(row)
    if beaten is None:
        return row["defense"], name, "–" if row["mse"] is None else short(row["mse"]), _proved(row), row["says"]
    says = f"Limits only servers that need the perturbed representation: {beaten_by(row, beaten)} without it."
    if row["kind"] == "meter" or row["certificate"] in PROVED:  # it speaks of every server
        says = f"Does not hold on these examples: {beaten_by(row, beaten)}."
    return row["defense"], name, "–", "beaten", says


def _proved(row: Row) -> str:
    if row["mse"] is None and row.get("chance") is None:
        return "–"
    if row["kind"] == "meter":
        return "first order"
    if row["certificate"] == "floor":
        return "if Gaussian"
    return "yes" if row["sound"] else "first order"


COLUMNS = ("defence", "found\nproved", "oblivious server", "server that knows")
COLOURS = {"recovered": "bold red", "recognised": "red", "traces": "yellow", "nothing": "green", "void": "dim"}
COLOURS |= {"identified": "red", "not_assessed": "magenta", "not_run": "dim"}


def verdict_table(judged: Sequence[Verdict], floor: Floor | None) -> RenderableType:
    """Return the table of verdicts, with the blind guess as its last row, and the verdicts in words under it."""
    modality = IMAGE if floor is None else floor.modality
    table = Table(*COLUMNS, judged[0].scored_by if judged else "accuracy", box=None, pad_edge=False)
    for v in judged:
        badge = Text(badges(modality)[v.found], COLOURS[v.found])
        if v.worst is not None and v.worst.tier in BEYOND and v.defense != "none":
            badge.append(f"\n({v.worst.tier})")
        accuracy = "–" if v.accuracy is None else score_text(v.accuracy, v.scored_by)
        if v.defense != "none":
            badge.append("\na bound, see below" if v.proved.holds else "\nnothing", "not bold not dim default")
        table.add_row(_spec(v.defense), badge, _cell(v.oblivious, modality), _cell(v.adaptive, modality), accuracy)
    if floor is not None:
        guess = Text(f"blind guess\n  {floor.guess}")
        table.add_row(guess, "the floor", f"{modality.error_name} {short(floor.error.mean)}", style="dim")
    return Group(table, Text(), *_words(judged))


def _words(judged: Sequence[Verdict]) -> list[Text]:
    """Return the verdicts in words, a sentence that holds for several defences once."""
    holds: dict[str, list[str]] = {}
    for v in judged:
        for sentence in re.split(r"(?<=\.) (?=[A-Z])", v.text):
            holds.setdefault(sentence, []).append(v.defense)
    said: dict[str, list[str]] = {}
    for sentence, defenses in holds.items():
        said.setdefault(", ".join(defenses), []).append(sentence)
    return [Text.assemble((f"{names}: ", "bold"), " ".join(its)) for names, its in said.items()]


def _spec(defense: str) -> Text:
    """Return a spec over two lines: the name, then its settings."""
    return Text(defense.replace(":", "\n  ", 1), overflow="fold")


def _cell(line: Line | None, modality: Modality) -> Text:
    if line is None:
        return Text("–")
    if not line.counts:
        return Text(f"void\n{by(line)}")
    got = f"{modality.error_name} {short(line.error.mean)}"
    if line.identified.count:
        got += f", {line.identified.hits}/{line.identified.count}"
    return Text(f"{got}\n{by(line)}")
