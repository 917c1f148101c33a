"""One run folder -> one HTML page that needs nothing else: no script, no font, no request."""

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.experiments.judge import Verdict, declaration_errors, headline, verdicts
from gradveil.experiments.rows import HALF, RECOVERED, SIGNIFICANT, Floor, Line, best_floor, lines
from gradveil.experiments.run_folder import REPORT, VERSIONS, RunFolder
from gradveil.experiments.words import BADGES, WHO
from gradveil.files import write_atomically
from gradveil.report.figures import errors_figure, trade_figure
from gradveil.report.pictures import pictures, thumbs
from gradveil.report.summary import left_out
from gradveil.report.table import HEAD, NUM_TEXTS, certificate_table, figure_errors, table_rows

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
        "Informed server",
        "Has every other record of the client, and a list of candidates for the one it does not have.",
    ),
    (
        "Patient server",
        "Knows the defence and has the client's updates of many rounds: what is drawn anew in each averages out.",
    ),
    (
        "Malicious server",
        "Chose the weights that it sent so that clients give more away. A client can check them: gradveil check-model.",
    ),
    (
        "Not assessed",
        "A server that knows the defence got nothing, but what is secret in the defence is neither declared nor found, "
        "or its declaration is wrong: there may be a simple way that nobody tried.",
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
    "Each attacked client took {schedule}, from the weights that the server sent. Pictures on the cards show the first "
    "image, not the best one. What no attack of this panel got, another may still get."
)


def write_report(folder: str | Path) -> Path:
    """Draw the page of a run folder, and return where it is. A pure function of the folder's data."""
    with RunFolder.open(folder).hold() as store:
        return draw(store)


def draw(store: RunFolder) -> Path:
    """Draw the page of a run that is held, as far as it is."""
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
    client = next((row for row in rows if row["kind"] == "client"), {})
    versions = tomllib.loads((store.path / VERSIONS).read_text("utf-8"))
    what = config.get("update", config.get("dataset", ""))
    return {
        "title": "What these updates give away" if "update" not in config else "What this update gives away",
        "subtitle": f"gradveil audit of {config['model']} on {what}, seed {config['seed']}, {versions.get('date', '')}",
        "errors": declaration_errors(rows) + figure_errors(rows),
        "headline": headline(rows),
        "verdicts": judged,
        "badges": BADGES,
        "badge_of": _badge_of,
        "caveat": CAVEAT.format(schedule=client.get("schedule", "one local step")),
        "thumbs": thumbs(store, judged),
        "picture_note": PICTURES if judged else "What the attacks brought back; there is no truth to compare with.",
        "pictures": pictures(store, found),
        "figures": _figures(found, judged, floor) if floor is not None else [],
        "table": {"head": HEAD, "texts": NUM_TEXTS, "rows": table_rows(found, floor)} if floor is not None else None,
        "certificates": certificate_table(rows),
        "left_out": left_out(rows),
        "images": floor.mse.count if floor is not None else 0,
        "reading": READING,
        "servers": list(dict.fromkeys((f"{row['defense']} · {row['server']}", row["why"]) for row in about)),
        "settings": [*_flat(config), *_flat(versions)],
    }


def _badge_of(verdict: Verdict) -> dict[str, str]:
    """Return the outcome by the server that is named on the card."""
    any_server: dict[str, str] = {"Any server": verdict.outcome} if verdict.defense == "none" else {}
    return {WHO[t.tier]: t.outcome for t in verdict.tiers} | any_server


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
                "title": f"Privacy against {judged[0].scored_by if judged else 'accuracy'}, {where}.",
                "caption": f"{both} Up and right is better. A defence holds as far as its filled mark lies at or above "
                "the dashed line, the blind guess; at the dotted line, the control, it does nothing.",
            }
        )
    return [figure for figure in figures if figure["svg"]]


def _flat(table: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k, ", ".join(map(str, v)) if isinstance(v, list) else str(v)) for k, v in table.items()]
