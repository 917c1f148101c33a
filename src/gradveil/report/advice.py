"""What to do about it: who was tried, and one recommendation with its cost and its command."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Tier
from gradveil.modalities import Modality
from gradveil.report.commands import audit_command, train_command
from gradveil.report.plain import name_of
from gradveil.threats.verdict import Verdict
from gradveil.threats.words import GETS, WHO

LEAKS = ("recovered", "recognised", "identified", "traces")
BEARABLE = 0.1  # of the accuracy, or of R², beyond which a defence is no recommendation
VEIL = "veil:promise=reconstruction"
WHAT_THEY_DO: dict[Tier, str] = {
    "oblivious": "takes what arrives as it is",
    "adaptive": "has read the defence's code",
    "informed": "has the client's other records",
    "multi-round": "adds up many rounds",
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
        sure = [v for v in holding if v.proved.holds]
        proof = "a bound is proved" if len(sure) == len(holding) else f"a bound is proved of {len(sure)} of them"
        if len(tried) == 1:
            return f"Nothing found by this panel; {holding[0].proved.text if not sure else proof}."
        name = f" ({name_of(holding[0].defense)})" if len(holding) == 1 else ""
        which = f"In {len(holding)} of {len(tried)} defences{name} nothing was found by this panel"
        return f"{which}; {proof if sure else 'nothing is proved'}."
    counts = {"gave them away": len(given), "gave traces": sum(_worst(v) == "traces" for v in tried)}
    counts["could not be judged"] = len(tried) - sum(counts.values())
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"No defence is shown to keep the {many} from the server: of {len(tried)}, {said}."


def advice(judged: Sequence[Verdict], config: Mapping[str, Any], rows: Sequence[Row] = ()) -> Advice | None:
    """Return one recommendation, or nothing where there is no truth to judge by.

    What is recommended held against every tier of servers, with all attacks tried, and what it costs these clients was
    measured and is bearable.
    """
    if not judged:
        return None
    plain = next((v for v in judged if v.defense == "none"), None)
    late = {row["defense"] for row in rows if row["kind"] == "skip" and _untried(row)}
    holding = [v for v in judged if v.defense != "none" and _holds(v)]
    tried = [v for v in holding if v.defense not in late and _whole(v)]
    priced = [v for v in tried if v.accuracy is not None and v.baseline is not None]
    if bearable := [v for v in priced if _lost(v) <= BEARABLE]:
        best = max(bearable, key=lambda v: v.accuracy or 0.0)
        text = f"Train with {name_of(best.defense)}: nothing found by this panel; {best.proved.said}."
        return Advice(text, _cost(best), train_command(config, best.defense))
    if priced and len(priced) == len(holding):
        best = max(priced, key=lambda v: v.accuracy or 0.0)
        text = f"No defence here keeps both: {name_of(best.defense)} held, and it costs too much."
        return Advice(text, _cost(best), audit_command(config, _other(judged)))
    if holding:
        open_ = max(holding, key=lambda v: (v in tried, v.accuracy or 0.0))
        missing = "" if open_ in tried else "not all attacks on it were tried"
        if open_ not in priced:
            missing += (" and " if missing else "") + "what it costs was not measured"
        text = f"Do not rely on {name_of(open_.defense)} yet: nothing was found, but {missing}. Audit it to the end."
        more = {"trained": True, "minutes": max(30.0, 4 * (config.get("minutes") or 0.0))}
        return Advice(text, _cost(open_), audit_command(config, open_.defense, **more))
    if plain is not None and not any(t.outcome in LEAKS for t in plain.tiers):
        text = (
            "Without a defence these attacks got nothing either, so no defence can be judged by them. Attack the first "
            "round, one example at a time, or give the attacks more time, before you call this safe."
        )
        return Advice(text, "", audit_command(config, None, images=1, examples=1, minutes=30.0))
    if any(v.defense.startswith("veil") for v in judged):
        text = "The noise tried is too weak: ask veil for a promise over the whole run."
    else:
        text = (
            "Rely on none of these. Audit veil next: it adds noise that reading its code does not undo, and keeps an "
            "account of it over the whole run."
        )
    cost = "Not measured in this audit; the command measures it, and gradveil plan says beforehand what to expect."
    return Advice(text, cost, audit_command(config, VEIL, trained=True))


def _untried(row: Row) -> bool:
    return bool(row.get("out_of_time")) or "control_failed" in row


def _whole(verdict: Verdict) -> bool:
    """Return whether servers of every tier were tried, but those that cannot be."""
    return all(t.outcome == "nothing" or "was not run: " in t.text for t in verdict.tiers)


def _lost(verdict: Verdict) -> float:
    return (verdict.baseline or 0.0) - (verdict.accuracy or 0.0)


def _other(judged: Sequence[Verdict]) -> str:
    return "veil:promise=identification" if any(v.defense.startswith("veil") for v in judged) else VEIL


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
