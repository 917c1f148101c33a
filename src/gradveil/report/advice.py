"""What to do about it: who was tried, and one recommendation with its cost and its command."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.experiments.judge import Verdict
from gradveil.experiments.words import WHO

LEAKS = ("recovered", "recognised", "traces")
VEIL = "veil:promise=reconstruction"


@dataclass(frozen=True)
class Advice:
    """What a person who must decide should do next."""

    text: str
    command: str


def tiers_tried(judged: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    """Return the servers that were tried on some defence, or without one, and those that were not."""
    tried = {t.tier for v in judged for t in v.tiers if t.outcome != "not_run"}
    names = {True: [], False: []}  # type: dict[bool, list[str]]
    for tier, name in WHO.items():
        names[tier in tried].append(name.lower())
    return names[True], names[False]


def advice(judged: Sequence[Verdict], config: Mapping[str, Any]) -> Advice | None:
    """Return one recommendation, or nothing where there is no truth to judge by."""
    if not judged:
        return None
    plain = next((v for v in judged if v.defense == "none"), None)
    holding = [v for v in judged if v.defense != "none" and _holds(v)]
    if holding:
        best = max(holding, key=lambda v: v.accuracy or 0.0)
        text = f"Of the defences tried, {best.defense} gave nothing to any server that was tried: evidence, no proof."
        return Advice(text + _cost(best), _command("train", config, best.defense))
    if plain is not None and not any(t.outcome in LEAKS for t in plain.tiers):
        text = (
            "Without a defence these attacks got nothing either, so no defence can be judged by them. Attack the first "
            "round, one example at a time, or give the attacks more time, before you call this safe."
        )
        return Advice(text, _command("audit", config, None) + " --images 1 --minutes 30")
    if any(v.defense.startswith("veil") for v in judged):
        text = "The noise tried is too weak. Ask for a promise over the whole run, and see what it costs first."
    else:
        text = (
            "No defence tried here holds. One that hides things by a rule falls to a server that has read the rule; "
            "veil adds noise that no rule undoes, and keeps an account of it over the whole run. See first what that "
            "costs your run (gradveil plan)."
        )
    return Advice(text, _command("audit", config, VEIL))


def _holds(verdict: Verdict) -> bool:
    ran = [t.outcome for t in verdict.tiers if t.outcome != "not_run"]
    return verdict.outcome == "nothing" and all(outcome == "nothing" for outcome in ran)


def _cost(verdict: Verdict) -> str:
    if verdict.accuracy is None or verdict.baseline is None:
        return ""
    lost = verdict.baseline - verdict.accuracy
    if verdict.scored_by != "accuracy":
        return f" In this audit's short training it cost {lost:.2f} of {verdict.scored_by}."
    points = f"{100 * lost:.1f} points" if lost > 0 else "nothing"
    return f" In this audit's short training it cost {points} of accuracy ({verdict.accuracy:.1%})."


def _command(name: str, config: Mapping[str, Any], defense: str | None) -> str:
    said = ["gradveil", name]
    for option in ("model", "dataset"):
        if config.get(option):
            said += [f"--{option}", str(config[option])]
    return shlex.join([*said, *(["--defense", defense] if defense else [])])
