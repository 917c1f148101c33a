"""How verdicts are worded."""

from collections.abc import Mapping

from gradveil.countermeasures import Tier
from gradveil.metrics.recovery import short
from gradveil.modalities import Modality
from gradveil.threats.rows import OBLIVIOUS, Floor, Line, MeasuredExample

GETS: dict[str, str] = {
    "recovered": "gets the {many} back",
    "recognised": "gets {many} that can be told from {others} others",
    "identified": "picks the {many} out of a list",
    "traces": "gets traces of the {many}",
    "nothing": "gets nothing",
}

_BADGES: dict[str, str] = {
    "recovered": "{many} recovered",
    "recognised": "{many} recognised",
    "identified": "{many} identified",
    "traces": "Traces found",
    "nothing": "Nothing found",
    "void": "Resists this budget",
    "not_assessed": "Not assessed",
    "not_run": "Not run",
}

UNDETECTABLE = (
    "No audit can detect a defence that recognises the audit, data in bits that no attack reads, or a secret kept "
    "outside the process."
)
DIAGNOSTIC = "evaluation mode"  # the weights of rows in a setting that is easier than what was configured

WHO: dict[Tier, str] = {
    "oblivious": "Oblivious server",
    "adaptive": "Adaptive server",
    "informed": "Informed server",
    "multi-round": "Multi-round server",
    "malicious": "Malicious server",
}
NOT_HERE: dict[Tier, str] = {
    "informed": "it compares candidates for one record, and an audit of a saved update has none",
    "multi-round": "it adds up the updates of many rounds, and one was saved",
    "malicious": "it chooses the weights that a client trains at, and this update was made at those that were sent",
}  # tiers of servers that one saved update cannot be attacked by, and why


def badges(modality: Modality) -> dict[str, str]:
    """Return each outcome in two words."""
    return {outcome: said.format(many=modality.many.capitalize()) for outcome, said in _BADGES.items()}


def gets(line: Line, floor: Floor, tier: Tier) -> str:
    """Return what a server of a tier gets, by its strongest line, with the numbers."""
    if not line.counts:
        return got(line, floor, tier)
    if line.tier != tier != "adaptive":
        return got(line, floor, tier)
    return f"{got(line, floor, tier)} ({_numbers(line, floor)}; {by(line)}, {line.round} round)"


def got(line: Line, floor: Floor, tier: Tier) -> str:
    """Return the same without numbers."""
    if not line.counts:
        return resists(line)
    kind = floor.modality
    if line.from_list and line.grade == "traces":
        return f"picks the right {kind.one} out of a list of {line.gallery} more often than chance"
    if line.from_list and line.tier == tier and line.grade != "nothing":
        return f"picks the right {kind.one} out of a list of {line.gallery}"
    said = GETS[line.grade].format(others=line.gallery - 1, many=kind.many)
    if line.grade == "recognised" and line.error.mean > floor.error.mean:
        said = f"gets {kind.many} that are poor {kind.part} by {kind.part} but can still be told from "
        said += f"{line.gallery - 1} others"
    if line.tier == tier:
        return said
    as_oblivious = line.tier == "oblivious"
    return f"{said}, as {'an oblivious one' if as_oblivious else 'one that knows the defence'} does"


def resists(line: Line) -> str:
    """Return that nothing can be read off an attack, since it fails without a defence as well, or had no time."""
    return f"resists this budget, which is no protection: {by(line)} {line.void}"


def server_name(one: Line | MeasuredExample) -> str:
    """Return what a server does, and its tier where that is not clear from it."""
    return one.server if one.tier in ("oblivious", "adaptive") else f"{one.tier}: {one.server}"


def by(line: Line) -> str:
    """Return what a server does and with which attack."""
    name = line.attack.partition(":")[0]
    return name if line.server in (OBLIVIOUS, name) else f"{line.server} + {name}"


def _numbers(line: Line, floor: Floor) -> str:
    said = f"{floor.modality.error_name} {short(line.error.mean)}"
    if line.error.mean > floor.error.mean:
        said += f", worse than a blind guess at {short(floor.error.mean)}"
    elif line.grade == "nothing":
        said += f", little better than a blind guess at {short(floor.error.mean)}"
    if line.server != OBLIVIOUS and line.control is not None:
        said += f", without a defence {short(line.control)}"
    if line.identified.count:
        said += f", identifies {line.identified.hits} of {line.identified.count}"
    return said


def accuracy_text(name: str, accuracy: Mapping[str, float], scored_by: str) -> str:
    """Return what a defence costs."""
    shown = {key: score_text(value, scored_by) for key, value in accuracy.items()}
    if name == "none" or "none" not in shown:
        return shown[name]
    return f"{shown[name]}, against {shown['none']} without a defence"


def score_text(score: float, scored_by: str) -> str:
    """Return a score in words: a share, or R²."""
    return f"{score:.1%}" if scored_by == "accuracy" else f"{score:.3f}"


def article(tier: Tier) -> str:
    """Return the article of a tier's server."""
    return "an" if tier == "informed" else "a"


def plural(word: str, count: int) -> str:
    """Return the word for so many."""
    return word if count == 1 else word + "s"
