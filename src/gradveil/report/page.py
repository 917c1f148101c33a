"""One run folder -> one HTML page that needs nothing else: no script, no font, no request."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from gradveil.errors import MissingExtraError
from gradveil.experiments.judge import Verdict, declaration_errors, headline, verdicts
from gradveil.experiments.rows import HALF, RECOVERED, SIGNIFICANT, Floor, Line, best_floor, lines, modality_of
from gradveil.experiments.run_files import FolderError
from gradveil.experiments.run_folder import REPORT, ROWS, RunFolder
from gradveil.experiments.words import WHO, badges
from gradveil.files import damage_told, write_atomically
from gradveil.modalities import IMAGE, Modality
from gradveil.report.advice import advice, tiers_tried
from gradveil.report.columns import column_table
from gradveil.report.figures import errors_figure, trade_figure
from gradveil.report.pictures import pictures, thumbs
from gradveil.report.summary import left_out
from gradveil.report.table import NUM_TEXTS, certificate_table, figure_errors, head, table_rows

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
        "The same attack on the same {many} and weights with no defence: the ceiling. If it fails, the attack's "
        "failure against a defence proves nothing.",
    ),
    (
        "Void",
        f"An attack whose control recovers fewer than {HALF:.0%} of the {{many}} and identifies fewer than {HALF:.0%}. "
        "A void line is never counted as protection; what it does recover still counts as a leak.",
    ),
    (
        "Blind guess",
        "What somebody who never saw the update would answer: {guesses}. The best of them is the floor: an attack "
        "above it has learned nothing.",
    ),
    (
        "Recovered",
        f"At least {HALF:.0%} of the {{many}} come back with an error under {RECOVERED:.0%} of the blind guess's.",
    ),
    (
        "Identified",
        "The reconstruction is nearer to its original than to every other {one} of the gallery (ties count against "
        "the attack): what privacy means to a person. Recognised: at least "
        f"{HALF:.0%} of the {{many}} are identified.",
    ),
    (
        "Traces",
        "Some {one} was recovered, or more were identified than chance explains (binomial test at "
        f"{SIGNIFICANT:.0%}), or the mean error is under {HALF:.0%} of the blind guess's.",
    ),
    (
        "Nothing found",
        "None of the attacks of this panel got anything, and their controls succeeded. That is evidence, not proof.",
    ),
    (
        "Error",
        "{error}: a diverged attack cannot look like protection. "
        "Reconstructions are chosen by the attack's own objective, never by the truth.",
    ),
)

PICTURES = "Under each picture: its mean squared error; ✓ and red where it picks its original out of the gallery. "
CELLS = (
    "Each {one} under its original; bold and red: a {part} that came back. ✓ where it picks its original out of the "
    "gallery. "
)
FIRST = "Shown first: the strongest attack of the naive server and of the server that knows each defence."

_NOT_AN_AUDIT = "It is no audit, or its rows were damaged: take them from a copy, or audit again."

CARDS = "Pictures on the cards show the first image, not the best one. "

NO_TRUTH = "What the attacks brought back; there is no truth to compare with."

CAVEAT = (
    "Each attacked client took {schedule}, from the weights that the server sent. {cards}What no attack of this panel "
    "got, another may still get."
)


def _reading(modality: Modality) -> list[tuple[str, str]]:
    words = {"one": modality.one, "many": modality.many, "guesses": modality.guess_text, "error": modality.error_text}
    return [(term, text.format(**words)) for term, text in READING]


def _note(modality: Modality) -> str:
    return (PICTURES if modality == IMAGE else CELLS.format(one=modality.one, part=modality.part)) + FIRST


def write_report(folder: str | Path) -> Path:
    """Draw the page of a run folder, and return where it is. A pure function of the folder's data."""
    with RunFolder.open(folder).hold() as store, damage_told(Path(folder) / ROWS, FolderError, _NOT_AN_AUDIT):
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
    config = store.settings
    rows = store.rows
    modality, floor, found, judged = modality_of(rows), best_floor(rows), lines(rows), verdicts(rows)
    about = [row for row in rows if row["kind"] == "defense"]
    client = next((row for row in rows if row["kind"] == "client"), {})
    cards = thumbs(store, judged)
    versions = store.versions
    what = config.get("update", config.get("dataset", ""))
    return {
        "title": "What these updates give away" if "update" not in config else "What this update gives away",
        "subtitle": f"gradveil audit of {config['model']} on {what}, seed {config['seed']}, {versions.get('date', '')}",
        "errors": declaration_errors(rows) + figure_errors(rows),
        "headline": headline(rows),
        "tried": tiers_tried(judged),
        "advice": advice(judged, config),
        "verdicts": judged,
        "badges": badges(modality),
        "badge_of": _badge_of,
        "caveat": CAVEAT.format(schedule=client.get("schedule", "one local step"), cards=CARDS if cards else ""),
        "thumbs": cards,
        "shown": "Pictures" if modality == IMAGE else modality.many.capitalize(),
        "picture_note": _note(modality) if judged else NO_TRUTH,
        "pictures": pictures(store, found),
        "columns": column_table(store, found),
        "figures": _figures(found, judged, floor) if floor is not None else [],
        "table": None
        if floor is None
        else {"head": head(modality), "texts": NUM_TEXTS, "rows": table_rows(found, floor)},
        "certificates": certificate_table(rows),
        "left_out": left_out(rows),
        "count": floor.error.count if floor is not None else 0,
        "many": modality.many,
        "reading": _reading(modality),
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
        both += "" if floor.modality.is_share else "Errors under 10⁻¹⁰ lie at the edge."
        figures.append(
            {
                "svg": errors_figure(found, names, floor, round_),
                "title": f"What the strongest attack gets, {where}.",
                "caption": f"{both} Bars: 95 % over {floor.modality.many}. Left is worse for the client. Dashed line: "
                f"the best blind guess ({floor.guess}); dotted: the control without a defence.",
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
