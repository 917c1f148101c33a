"""What to do about it: who was tried, and one recommendation with its cost and its command."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Tier
from gradveil.modalities import Modality
from gradveil.report.plain import name_of
from gradveil.threats.setup import AuditConfig
from gradveil.threats.verdict import GETS, WHO, Verdict

SAME = ("model", "dataset", "data", "seed", "partition", "clients", "epochs", "batch_size", "lr", "loss")
LOCAL = ("optimizer", "momentum", "weight_decay", "proximal", "clip", "trains")
SERVER = ("aggregator", "sampling", "schedule", "weighting")
SAME_AS = (*SAME, *LOCAL, *SERVER)  # of training and of audits
AUDITS = ("images", "examples", "gallery", "weights", "device", "minutes")
ALWAYS = ("model", "dataset", "clients", "lr", "batch_size", "rounds")  # what ``train`` may have other defaults for
PLANS = ("cohort", "records", "batch_size", "epochs", "rounds", "participations", "tier", "parameters")
_DEFAULT = AuditConfig()


def audit_command(config: Mapping[str, Any], defense: str | None, **other: Any) -> str:
    """Return an audit as the run's was, of one defence: its settings where they are not the default."""
    chosen = {**config, **other}
    said = ["gradveil", "audit"]
    for name in (*SAME_AS, *AUDITS):
        if name in chosen and chosen[name] != getattr(_DEFAULT, name):
            said += _option(name, chosen[name])
    if chosen.get("trained"):
        said += _option("rounds", chosen.get("rounds", _DEFAULT.rounds))
    return shlex.join([*said, *(["--defense", defense] if defense else [])])


def train_command(config: Mapping[str, Any], defense: str) -> str:
    """Return a training with the run's clients, rounds and local steps; what else ``train`` has is its default."""
    said = ["gradveil", "train"]
    for name in (*SAME_AS, "rounds", "device"):
        value = config.get(name, getattr(_DEFAULT, name))
        if name in ALWAYS or value != getattr(_DEFAULT, name):
            said += _option(name, value)
    return shlex.join([*said, "--defense", defense])


def plan_command(config: Mapping[str, Any], change: Mapping[str, Any] | None) -> str:
    """Return a plan of a client after a change, or of this model and data where none was planned."""
    said = ["gradveil", "plan", "--promise", "reconstruction"]
    if change is not None:
        run = {**change["run"], "tier": change["tier"], "parameters": change["parameters"]}
        return shlex.join([*said, *(word for name in PLANS for word in _option(name, run[name]))])
    known = {name: config.get(name) for name in ("model", "dataset", "data")}
    both = known["model"] and known["dataset"]
    return shlex.join([*said, *(word for name in known if both for word in _option(name, known[name]))])


def _option(name: str, value: Any) -> list[str]:
    value = 0 if name == "batch_size" and value is None else value  # all of them
    return [] if value in (None, "") else [f"--{name.replace('_', '-')}", str(value)]


LEAKS = ("recovered", "recognised", "identified", "traces")
BEARABLE = 0.1  # of the accuracy, or of R², beyond which a defence is no recommendation
VEIL = "veil:promise=reconstruction"
NOT_MEASURED = "Not measured in this audit; the command says beforehand what to expect."
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
        first = (
            f"No defence here keeps both, privacy and accuracy: {name_of(best.defense)} held, and it costs too much."
        )
        return _planned(first, _cost(best), config, rows)
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
        return Advice(text, "", audit_command(config, None, examples=1, minutes=30.0))
    weak = any(v.defense.startswith("veil") for v in judged)
    return _planned("The noise tried is too weak." if weak else "Rely on none of these.", "", config, rows)


def _planned(first: str, cost: str, config: Mapping[str, Any], rows: Sequence[Row]) -> Advice:
    """Return a promise whose noise is planned to cost this client little; where settings alone do not get there, that
    no defence here keeps both, and what it takes."""
    changes = [row for row in rows if row["kind"] == "change"]
    enough = next((row for row in changes if row["together"] <= row["limit"]), None)
    if enough is None:
        text = f"{first} No defence here is known to keep both: plan what a promise over the whole run would take."
        return Advice(text, cost or NOT_MEASURED, plan_command(config, None))
    noise = (
        f"noise at {enough['together']:.2g} of the signal; up to {enough['limit']:g} cost two points or less in trials"
    )
    cost = f"{cost} Planned for this client: {noise}.".strip()
    if not enough["by_settings"]:
        text = f"{first} No defence here keeps both, privacy and accuracy: it takes the changes below, up to"
        text = f"{text} {enough['what']}."
        return Advice(text, cost, plan_command(config, enough))
    what = f", with the changes below up to {enough['what']}" if enough["how"] else ""
    options = {name: value for name, value in enough["options"].items() if name != "tier"}
    spec = VEIL + (",tier=aggregate" if "tier" in enough["options"] else "")
    text = f"{first} Audit veil next{what}: reading its code does not undo its noise, and it keeps an account of it."
    return Advice(text, cost, audit_command(config, spec, **{**options, "trained": True}))


def change_table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return what would have to change for the promise to cost little, cheapest first: what, asked for by, the noise of
    this alone and of all up to it, and what that costs."""
    return [
        (
            row["what"],
            row["how"] or ("–" if row["by_settings"] else "more data, or more clients"),
            "–" if row["alone"] is None else f"{row['alone']:.2g}",
            f"{row['together']:.2g}",
            "two points or less" if row["together"] <= row["limit"] else "more than two points",
        )
        for row in rows
        if row["kind"] == "change"
    ]


def _untried(row: Row) -> bool:
    return bool(row.get("out_of_time")) or "control_failed" in row


def _whole(verdict: Verdict) -> bool:
    """Return whether servers of every tier were tried, but those that cannot be."""
    return all(t.outcome == "nothing" or "was not run: " in t.text for t in verdict.tiers)


def _lost(verdict: Verdict) -> float:
    return (verdict.baseline or 0.0) - (verdict.accuracy or 0.0)


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
