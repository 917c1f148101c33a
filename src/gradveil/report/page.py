"""One run folder -> one HTML page that needs nothing else: no font, no request; the script in it only adds comfort."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.auditing.gate import left_out
from gradveil.auditing.run_folder import REPORT, ROUNDS, ROWS, FolderError, Row, RunFolder
from gradveil.errors import MissingExtraError
from gradveil.files import wrap_parse_errors, write_atomically
from gradveil.report.advice import advice, change_table, tiers_tried, verdict_sentence
from gradveil.report.figures import WIDTH, number, round_figures
from gradveil.report.pictures import Gallery, cards, column_table, film_strips, pictures
from gradveil.report.plain import name_of
from gradveil.report.rounds import rounds_content
from gradveil.report.table import NUM_TEXTS, certificate_table, head, table_rows
from gradveil.threats.rows import HALF, RECOVERED, SIGNIFICANT, best_floor, figure_errors, lines, modality_of
from gradveil.threats.verdict import (
    UNDETECTABLE,
    badges,
    declaration_errors,
    headline,
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
        from jinja2 import DictLoader, Environment
    except ImportError as error:
        raise MissingExtraError("The HTML report", "report") from error
    parts = {one.name: one.read_text("utf-8") for one in (files("gradveil.report") / "templates").iterdir()}
    made = Environment(autoescape=True, trim_blocks=True, loader=DictLoader(parts))
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
