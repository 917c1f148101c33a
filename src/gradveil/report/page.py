"""One run folder -> one HTML page that needs nothing else: no font, no request; the script in it only adds comfort."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.auditing.gate import left_out
from gradveil.auditing.run_folder import REPORT, ROUNDS, ROWS, FolderError, Row, RunFolder
from gradveil.errors import MissingExtraError
from gradveil.files import wrap_parse_errors, write_atomically
from gradveil.modalities import IMAGE
from gradveil.report.advice import advice, change_table, tiers_tried, verdict_sentence
from gradveil.report.cards import cards, column_table, film_strips
from gradveil.report.figures import errors_figure, figure_table, trade_figure
from gradveil.report.pictures import Gallery, pictures
from gradveil.report.plain import CARDS, CAVEAT, NO_TRUTH, name_of, picture_note, reading
from gradveil.report.rounds import rounds_content
from gradveil.report.table import NUM_TEXTS, certificate_table, head, table_rows
from gradveil.threats.rows import Floor, Line, best_floor, figure_errors, lines, modality_of
from gradveil.threats.verdict import UNDETECTABLE, Verdict, badges, declaration_errors, headline, verdicts

_NOT_AN_AUDIT = "It is no audit, or its rows were damaged: take them from a copy, or audit again."


def write_report(folder: str | Path) -> Path:
    """Draw the page of a run folder, and return where it is. A pure function of the folder's data."""
    with RunFolder.open(folder).hold() as store, wrap_parse_errors(Path(folder) / ROWS, FolderError, _NOT_AN_AUDIT):
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
    made = Environment(autoescape=True, trim_blocks=True, loader=DictLoader(parts)).get_template(template)
    return made.render(style=parts["page.css"], script=parts["page.js"], name_of=name_of, **content)


def _content(store: RunFolder) -> dict[str, Any]:
    config = store.settings
    rows = store.rows
    modality, floor, found, judged = modality_of(rows), best_floor(rows), lines(rows), verdicts(rows)
    about = [row for row in rows if row["kind"] == "defense"]
    client = next((row for row in rows if row["kind"] == "client"), {})
    gallery = Gallery(store)
    versions = store.versions
    what = config.get("update", config.get("dataset", ""))
    return {
        "title": "What these updates give away" if "update" not in config else "What this update gives away",
        "single": "update" in config,
        "subtitle": f"gradveil audit of {config['model']} on {what}, seed {config['seed']}, {versions.get('date', '')}",
        "errors": declaration_errors(rows) + figure_errors(rows),
        "verdict": verdict_sentence(judged, modality),
        "headline": headline(rows),
        "tried": tiers_tried(judged),
        "advice": advice(judged, config, rows),
        "changes": change_table(rows),
        "badges": badges(modality),
        "start": f"those of {config['weights']}" if config.get("weights") else "as the model was made",
        "schedule": client.get("schedule", "one local step"),
        "late": sum(row["kind"] == "skip" and bool(row.get("out_of_time")) for row in rows),
        "caveat": CAVEAT,
        "undetectable": UNDETECTABLE,
        "card_note": CARDS.format(one=modality.one, many=modality.many),
        "cards": cards(gallery, rows, judged),
        "one": modality.one,
        "part": modality.part,
        "heads": modality.heads,
        "films": film_strips(gallery, rows),
        "shown": "Pictures" if modality == IMAGE else modality.many.capitalize(),
        "picture_note": picture_note(modality) if judged else NO_TRUTH,
        "pictures": pictures(gallery, rows, found),
        "columns": column_table(store, found),
        "figures": _figures(found, judged, floor) if floor is not None else [],
        "table": None
        if floor is None
        else {"head": head(modality), "texts": NUM_TEXTS, "rows": table_rows(found, floor)},
        "certificates": certificate_table(rows),
        "left_out": left_out(rows),
        "count": floor.error.count if floor is not None else 0,
        "many": modality.many,
        "reading": reading(modality),
        "servers": list(dict.fromkeys((f"{row['defense']} · {row['server']}", row["why"]) for row in about)),
        "settings": [*_of_rows(rows), *_flat(config), *_flat(versions)],
    }


def _figures(found: list[Line], judged: list[Verdict], floor: Floor) -> list[dict[str, Any]]:
    names = [v.defense for v in judged]
    figures = []
    for round_ in dict.fromkeys(line.round for line in found):
        where = f"{round_} round" if round_ != "update" else "the update"
        both = "Hollow: oblivious server; filled: server that knows the defence; dashed outline: void. "
        numbers = figure_table(found, judged, floor, round_)
        both += "" if floor.modality.is_share else "Errors under 10⁻¹⁰ lie at the edge."
        figures.append(
            {
                "svg": errors_figure(found, names, floor, round_),
                "table": numbers,
                "title": f"What the strongest attack gets, {where}.",
                "caption": f"{both} Bars: 95 % over {floor.modality.many}. Left is worse for the client. Dashed line: "
                f"the best blind guess ({floor.guess}); dotted: the control without a defence.",
            }
        )
        figures.append(
            {
                "svg": trade_figure(found, judged, floor, round_),
                "table": None,
                "title": f"Privacy against {judged[0].scored_by if judged else 'accuracy'}, {where}.",
                "caption": f"{both} Up and right is better. A defence holds as far as its filled mark lies at or above "
                "the dashed line, the blind guess; at the dotted line, the control, it does nothing.",
            }
        )
    return [figure for figure in figures if figure["svg"]]


def _of_rows(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what became black and white of images of more than eight bits, and rows that other versions made."""
    found = next((row for row in rows if row["kind"] == "levels"), None)
    told = "images of more than 8 bits: the lowest value {black:g} is black, the highest {white:g} white, in 256 levels"
    levels = [("levels", told.format(**found))] if found else []
    others = [", ".join(f"{k} {v}" for k, v in row["versions"].items()) for row in rows if row.get("versions")]
    return levels + [("made by others", f"{others.count(one)} rows: {one}") for one in dict.fromkeys(others)]


def _flat(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in table.items()]
