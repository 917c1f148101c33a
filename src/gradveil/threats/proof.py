"""Proofs of defences, with their conditions; and attacks that contradict a figure that was proved."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradveil.auditing.run_folder import Row
from gradveil.metrics.recovery import chance_of, short
from gradveil.threats.rows import Line, lines

PROVED = ("floor", "guess")  # for every server, the floor for Gaussian images: an attack beyond one is an error
FAR = 0.5  # of a figure: what lies under that with its whole 95 % interval contradicts it
LUCK = 1e-3  # how unlikely so many right picks must be under a guess bound, to contradict it
VACUOUS = 0.99  # a chance that is no limit
NAMES = {
    "local": "the paper's theorem 1",
    "global": "the Lipschitz bound",
    "floor": "the Gaussian floor",
    "guess": "the guess bound",
    "measured": "the measured μ",
}


@dataclass(frozen=True)
class Proved:
    """The certificate that holds for a defence over the whole run, or that there is none."""

    holds: bool = False
    text: str = "nothing is proved"
    conditions: tuple[str, ...] = ()  # under which it holds

    @property
    def said(self) -> str:
        """The same, as what follows a finding."""
        return f"proved: {self.text}" if self.holds else self.text


NOTHING_PROVED = Proved()


def proved_of(rows: Sequence[Row], defense: str) -> Proved:
    """Return what limits every server of a defence: the guess bound over the whole run, where nothing contradicts it.

    Figures of single layers and of the leak meter limit some servers only, the Gaussian floor is for Gaussian images.
    """
    mine = [row for row in rows if row["kind"] == "certificate" and row["defense"] == defense]
    bound = next((row for row in mine if row["certificate"] == "guess" and row["layer"] == "the whole run"), None)
    if bound is None:
        failed = next((row for row in mine if row["certificate"] == "floor" and not row["sound"]), None)
        return NOTHING_PROVED if failed is None else Proved(text=f"nothing is proved: {failed['says'].rstrip('.')}")
    if any(row["kind"] == "probe" and row["defense"] == defense and row["errors"] for row in rows):
        return Proved(text="nothing is proved: its declaration is wrong")
    if wrong := [text for row, text in _errors(rows) if row["defense"] == defense and row["kind"] == "certificate"]:
        return Proved(text=f"nothing is proved: its promise was contradicted ({wrong[0].rstrip('.')})")
    if bound["chance"] is not None and bound["chance"] > VACUOUS:
        said = f"nothing is proved that limits a server: {bound['says'][0].lower()}{bound['says'][1:].rstrip('.')}"
        return Proved(text=said)
    says = bound["says"].rstrip(".")
    return Proved(True, f"over the whole run, {says[0].lower()}{says[1:]}", tuple(bound["assumptions"]))


def beaten_figures(rows: Sequence[Row]) -> list[tuple[Row, Line]]:
    """Return each figure under which an attack on one update got, at the same weights, with that attack."""
    found = [x for x in lines(rows) if x.round == "first" and x.tier in ("oblivious", "adaptive") and x.at_own_weights]
    pairs = []
    for row in rows:
        if row.get("certificate") in PROVED:
            pairs += [(row, line) for line in _beyond(row, rows)[:1]]
        elif row["kind"] in ("certificate", "meter") and row["mse"] is not None:
            under = [x for x in found if x.defense == row["defense"] and x.mse.mean < row["mse"]]
            pairs += [(row, min(under, key=lambda x: x.mse.mean))] if under else []
    return pairs


def _beyond(row: Row, rows: Sequence[Row]) -> list[Line]:
    """Return the attacks that contradict a floor or a guess bound beyond what luck explains, the strongest first."""
    bound = [x for x in lines(rows) if x.defense == row["defense"] and x.tier in row["tiers"] and x.at_own_weights]
    if row["certificate"] == "floor":
        under = [x for x in bound if row["mse"] is not None and x.mse.high < row["mse"]]
        return sorted(under, key=lambda x: x.mse.mean)
    if row["chance"] is None:
        return []
    picked = [x for x in bound if x.identified.count]
    over = [x for x in picked if chance_of(x.identified.hits, x.identified.count, row["chance"]) < LUCK]
    return sorted(over, key=lambda x: -x.identified.mean)


def figure_errors(rows: Sequence[Row]) -> list[str]:
    """Return what is wrong with figures that speak of every server: an attack got far under them, or μ was measured
    above its promise.

    The meter's figure is an average over Gaussian images, to first order: on a few images an attack may come out
    somewhat below it, which takes the figure off the page and is no error.
    """
    return [text for _, text in _errors(rows)]


def _errors(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    errors = [
        (row, f"{row['defense']} exceeds its promise: {'; '.join(row['reasons'])}. {row['mu_proved']:.3g} is proved.")
        for row in rows
        if row.get("certificate") == "measured" and row.get("reasons")
    ]
    for row, line in beaten_figures(rows):
        if row.get("certificate") in PROVED or (row["kind"] == "meter" and line.mse.high < FAR * row["mse"]):
            figure = f"T{figure_name(row)[1:]}'s figure for {row['defense']} ({row.get('server') or row['layer']})"
            errors.append((row, f"{figure} does not hold: {beaten_by(row, line)}."))
    return errors


def beaten_by(row: Row, line: Line) -> str:
    """Return a figure and what an attack got beyond it."""
    if row.get("certificate") == "guess":
        return f"it says {short(row['chance'])}, and {line.attack} picked {line.identified.as_count}"
    return f"it says {short(row['mse'])}, and {line.attack} got {short(line.mse.mean)}"


def figure_name(row: Row) -> str:
    """Return what a figure is called."""
    return "the leak meter" if row["kind"] == "meter" else NAMES[row["certificate"]]
