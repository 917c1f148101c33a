"""One run folder -> one HTML page that needs nothing else: no script, no font, no request."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.experiments.judge import BADGES, Verdict, headline, verdicts
from gradveil.experiments.rows import Floor, Line, best_floor, lines
from gradveil.experiments.run_folder import REPORT, VERSIONS, RunFolder
from gradveil.files import write_atomically
from gradveil.report.figures import errors_figure, trade_figure
from gradveil.report.glossary import CAVEAT, PICTURES, READING, promises_table
from gradveil.report.pictures import albums, thumbs
from gradveil.report.table import HEAD, NUM_TEXTS, table_rows


def write_report(folder: str | Path) -> Path:
    """Draw the page of a run folder, and return where it is. A pure function of the folder's data."""
    with RunFolder.open(folder).hold() as store:
        path = store.path / REPORT
        write_atomically(path, render(store).encode())
    return path


def render(store: RunFolder) -> str:
    """Return the page of a run as text."""
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise MissingExtraError("The HTML report", "report") from error
    templates = files("gradveil.report") / "templates"
    page = Environment(autoescape=True, trim_blocks=True).from_string((templates / "page.html").read_text("utf-8"))
    return page.render(style=(templates / "page.css").read_text("utf-8"), **_content(store))


def _content(store: RunFolder) -> dict[str, Any]:
    config = tomllib.loads(store.config)
    rows = store.rows
    floor, found, judged = best_floor(rows), lines(rows), verdicts(rows)
    about = [row for row in rows if row["kind"] == "defense"]
    versions = tomllib.loads((store.path / VERSIONS).read_text("utf-8"))
    what = config.get("update", config.get("dataset", ""))
    return {
        "title": "What these updates give away" if "update" not in config else "What this update gives away",
        "subtitle": f"gradveil audit of {config['model']} on {what}, seed {config['seed']}, {versions.get('date', '')}",
        "headline": headline(rows),
        "verdicts": judged,
        "badges": BADGES,
        "caveat": CAVEAT,
        "thumbs": thumbs(store, judged),
        "picture_note": PICTURES if judged else "What the attacks brought back; there is no truth to compare with.",
        "albums": albums(store, found),
        "figures": _figures(found, judged, floor) if floor is not None else [],
        "table": {"head": HEAD, "texts": NUM_TEXTS, "rows": table_rows(found, floor)} if floor is not None else None,
        "promises": promises_table(rows),
        "images": floor.mse.count if floor is not None else 0,
        "reading": READING,
        "servers": [(f"{row['defense']} · {row['server']}", row["why"]) for row in about],
        "settings": [*_flat(config), *_flat(versions)],
    }


def _figures(found: list[Line], judged: list[Verdict], floor: Floor) -> list[dict[str, str]]:
    names = [v.defense for v in judged]
    figures = []
    for round_ in dict.fromkeys(line.round for line in found):
        where = f"{round_} round" if round_ != "update" else "the update"
        both = "Hollow: naive server; filled: server that knows the defence; dashed outline: void. "
        both += "Errors under 10⁻¹⁰ lie at the edge."
        figures.append(
            {
                "svg": errors_figure(found, names, floor, round_),
                "title": f"What the strongest attack gets, {where}.",
                "caption": f"{both} Bars: 95 % over images. Left is worse for the client. Dashed line: the best blind "
                f"guess ({floor.guess}); dotted: the control without a defence.",
            }
        )
        figures.append(
            {
                "svg": trade_figure(found, judged, floor, round_),
                "title": f"Privacy against accuracy, {where}.",
                "caption": f"{both} Up and right is better. A defence holds as far as its filled mark lies at or above "
                "the dashed line, the blind guess; at the dotted line, the control, it does nothing.",
            }
        )
    return [figure for figure in figures if figure["svg"]]


def _flat(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in table.items()]
