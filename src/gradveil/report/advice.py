"""What to do about it: who was tried, and one recommendation with its cost and its command."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.countermeasures import Tier
from gradveil.experiments.judge import Verdict
from gradveil.experiments.words import GETS, WHO
from gradveil.modalities import Modality
from gradveil.report.plain import name_of

LEAKS = ("recovered", "recognised", "identified", "traces")
VEIL = "veil:promise=reconstruction"
WHAT_THEY_DO: dict[Tier, str] = {
    "naive": "takes what arrives as it is",
    "knows": "has read the defence's code",
    "informed": "has the client's other records",
    "patient": "adds up many rounds",
    "malicious": "chooses the weights it sends",
}


@dataclass(frozen=True)
class Advice:
    """What a person who must decide should do next."""

    text: str
    cost: str
    command: str


def tiers_tried(judged: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """Return the servers that were tried on some defence, or without one, and those that were not."""
    tried = {t.tier for v in judged for t in v.tiers if t.outcome != "not_run"}
    names = {True: [], False: []}  # type: dict[bool, list[str]]
    for tier, name in WHO.items():
        names[tier in tried].append(f"{name.lower()} ({WHAT_THEY_DO[tier]})")
    return names[True], names[False]


def verdict_sentence(judged: Sequence[Verdict], modality: Modality) -> str:
    """Return the whole audit in one sentence, or nothing where there is no truth to judge by."""
    many = modality.many
    tried = [v for v in judged if v.defense != "none"]
    if not tried:
        got = _worst(judged[0]) if judged else ""
        return f"Without a defence a server {GETS[got].format(many=many, others='all other')}." if got else ""
    given = [v for v in tried if _worst(v) in LEAKS[:3]]
    holding = [v for v in tried if _holds(v)]
    if len(given) == len(tried):
        who = "The defence does not keep" if len(tried) == 1 else f"None of the {len(tried)} defences keeps"
        return f"{who} the {many} from the server."
    if holding:
        name = f": {name_of(holding[0].defense)}" if len(holding) == 1 < len(tried) else ""
        who = "The defence" if len(tried) == 1 else f"{len(holding)} of {len(tried)} defences"
        return f"{who} kept the {many} from every server that was tried{name}."
    counts = {"gave them away": len(given), "gave traces": sum(_worst(v) == "traces" for v in tried)}
    counts["could not be judged"] = len(tried) - sum(counts.values())
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"No defence is shown to keep the {many} from the server: of {len(tried)}, {said}."


def advice(judged: Sequence[Verdict], config: Mapping[str, Any]) -> Advice | None:
    """Return one recommendation, or nothing where there is no truth to judge by."""
    if not judged:
        return None
    plain = next((v for v in judged if v.defense == "none"), None)
    holding = [v for v in judged if v.defense != "none" and _holds(v)]
    if holding:
        best = max(holding, key=lambda v: v.accuracy or 0.0)
        text = f"Train with {name_of(best.defense)}: no server that was tried got anything. Evidence, no proof."
        return Advice(text, _cost(best), _command("train", config, best.defense))
    if plain is not None and not any(t.outcome in LEAKS for t in plain.tiers):
        text = (
            "Without a defence these attacks got nothing either, so no defence can be judged by them. Attack the first "
            "round, one example at a time, or give the attacks more time, before you call this safe."
        )
        return Advice(text, "", _command("audit", config, None) + " --images 1 --minutes 30")
    if any(v.defense.startswith("veil") for v in judged):
        text = "The noise tried is too weak: ask veil for a promise over the whole run."
    else:
        text = (
            "Rely on none of these. Audit veil next: it adds noise that reading its code does not undo, and keeps an "
            "account of it over the whole run."
        )
    cost = "Not measured in this audit; the command measures it, and gradveil plan says beforehand what to expect."
    return Advice(text, cost, _command("audit", config, VEIL))


def _worst(verdict: Verdict) -> str:
    """Return the most that any server got; where none got anything, that."""
    got = [t.outcome for t in verdict.tiers]
    return next((outcome for outcome in (*LEAKS, "nothing") if outcome in got), "")


def _holds(verdict: Verdict) -> bool:
    ran = [t.outcome for t in verdict.tiers if t.outcome != "not_run"]
    return verdict.outcome == "nothing" and all(outcome == "nothing" for outcome in ran)


def _cost(verdict: Verdict) -> str:
    if verdict.accuracy is None or verdict.baseline is None:
        return "Not measured in this audit."
    lost, here = verdict.baseline - verdict.accuracy, "in this audit's short training"
    if verdict.scored_by != "accuracy":
        return f"{lost:.2f} of {verdict.scored_by} {here}."
    points = f"{100 * lost:.1f} points of accuracy" if lost > 0 else "Nothing"
    return f"{points} {here} ({verdict.accuracy:.1%}, against {verdict.baseline:.1%} without a defence)."


def _command(name: str, config: Mapping[str, Any], defense: str | None) -> str:
    said = ["gradveil", name]
    for option in ("model", "dataset"):
        if config.get(option):
            said += [f"--{option}", str(config[option])]
    if config.get("partition") == "natural":  # of a table with --by, which its spec says without dealing by it
        said += ["--partition", "natural"]
    return shlex.join([*said, *(["--defense", defense] if defense else [])])
