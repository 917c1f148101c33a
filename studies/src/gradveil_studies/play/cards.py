"""The playground's pieces of HTML: the cards of the servers, the figures, and what was tried before."""

from collections.abc import Iterable, Sequence
from html import escape

from torch import Tensor

from gradveil.metrics import short
from gradveil.modalities import Modality
from gradveil.report.pictures import picture
from gradveil.threats.verdict import WHO
from gradveil_studies.play.servers import CONTROL, Rebuilt

STATES = {
    "waiting": "waits",
    "searching": "at work",
    "done": "done",
    "stopped": "stopped",
    "refused": "cannot",
}
CSS = """
.gv-cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 0; padding: 0; list-style: none }
.gv-card { flex: 1 1 128px; max-width: 340px; border: 1px solid #8886; border-radius: 8px; padding: 10px; margin: 0 }
.gv-card img { width: 100%; image-rendering: pixelated; background: #8882 }
.gv-card h3 { font-size: 1rem; margin: 0 0 6px }
.gv-card p { margin: 6px 0 0; font-size: .9rem }
.gv-empty { aspect-ratio: 1; display: grid; place-items: center; background: #8882 }
.gv-cells { display: flex; flex-wrap: wrap; gap: 3px; font-size: .85rem; max-height: 22em; overflow: auto }
.gv-cells span { border: 1px solid #8886; border-radius: 4px; padding: 0 4px }
.gv-cells .right { background: #b00020; color: #fff; border-color: #b00020 }
.gv-table { overflow-x: auto; max-width: 100% }
.gv-table table { border-collapse: collapse; font-size: .9rem }
.gv-table th, .gv-table td { text-align: left; padding: 4px 8px; border-bottom: 1px solid #8884; vertical-align: top }
.gv-said { font-weight: 600 }
.min_value, .max_value { color: inherit !important }
"""


def example(kind: Modality, x: Tensor, alt: str, truth: Tensor | None = None) -> str:
    """Return one example as it was measured: a picture, or its cells, those a server has right marked."""
    cells = kind.cells(x, truth)
    if cells is None:
        return f'<img src="{picture(x.numpy())}" alt="{escape(alt)}">'
    heads = kind.heads or [""] * len(cells)
    parts = [
        f"<span{' class=right' if cell.right else ''}>{escape(f'{head}: {cell.text}' if head else cell.text)}</span>"
        for head, cell in zip(heads, cells, strict=False)
    ]
    return f'<div class="gv-cells" tabindex="0" role="group" aria-label="{escape(alt)}">{"".join(parts)}</div>'


def card(title: str, inside: str, said: str) -> str:
    """Return one card."""
    return f'<li class="gv-card"><h3>{escape(title)}</h3>{inside}<p>{escape(said)}</p></li>'


def title_of(got: Rebuilt, rounds: int, several: bool) -> str:
    """Return which server it is; what it does as well, where several know the defence."""
    server = got.trial.server
    if got.trial.about == CONTROL:
        return "Without a defence"
    name = f"{WHO[server.tier]}, {rounds} rounds" if server.tier == "multi-round" else WHO[server.tier]
    return f"{name}: {server.name}" if several and server.tier != "oblivious" else name


def all_cards(
    kind: Modality, truth: Tensor, guess: tuple[str, Tensor, float], found: Sequence[Rebuilt], rounds: int
) -> str:
    """Return the truth, the blind guess and what each server has so far, side by side."""
    name, blind, least = guess
    shown = [
        card("The client's own", example(kind, truth, "the original"), f"what no server is to see ({kind.one})"),
        card(
            "Blind guess",
            example(kind, blind, f"blind guess: {name}", truth),
            f"{name}, without any update: {kind.error_name} {short(least)}",
        ),
    ]
    several = sum(got.trial.server.tier != "oblivious" for got in found) > 1
    for got in found:
        title = title_of(got, rounds, several)
        if got.shown is None:
            shown.append(card(title, f'<div class="gv-empty">{STATES[got.state]}</div>', got.why))
            continue
        said = f"{kind.error_name} {short(got.error)}{_beside(got.error, least)}; {STATES[got.state]}"
        said += f", step {got.steps}" if got.steps else ""
        shown.append(card(title, example(kind, got.shown, f"{title}: {said}", truth), said))
    return f'<ul class="gv-cards">{"".join(shown)}</ul>'


def _beside(error: float, least: float) -> str:
    if not least:
        return ""
    return f", {short(error / least)} of the blind guess's" if error < least else ", no better than the blind guess"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Return a table; the first cell of each row is its head."""
    top = "".join(f"<th scope=col>{escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr><th scope=row>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    head = f"<thead><tr>{top}</tr></thead>" if heads else ""
    return (
        f'<div class="gv-table" tabindex="0" role="region" aria-label="{escape(caption)}"><table>{head}'
        f"<tbody>{body}</tbody></table></div>"
    )
