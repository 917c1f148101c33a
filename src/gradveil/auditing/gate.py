"""The gate: whether an audit passes, for a program that has to decide. Inconclusive audits fail."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import Tier
from gradveil.errors import SpecError, did_you_mean
from gradveil.metrics import Interval
from gradveil.threats.rows import GRADES, Floor, Line, best_floor, figure_errors, group, lines, proved_of
from gradveil.threats.verdict import WHO, Verdict, article, declaration_errors, verdicts

if TYPE_CHECKING:
    from gradveil.auditing.audit import Audit

FailOn = Literal["recovered", "recognised", "unproved"]
GateResult = Literal["passed", "failed", "uninformative"]
EXIT_CODES: dict[GateResult, int] = {"passed": 0, "failed": 3, "uninformative": 4}
SEVERITY: tuple[GateResult, ...] = ("passed", "uninformative", "failed")


@dataclass(frozen=True)
class Gate:
    """What the gate says of the audit, or of one defence of it."""

    result: GateResult
    why: str


def read_fail_on(text: str | None) -> FailOn | None:
    """Read the option."""
    known = get_args(FailOn)
    if text is not None and text not in known:
        raise SpecError(
            f"--fail-on {text!r} is not known. {did_you_mean(text, known)}Give {', '.join(known[:-1])} or {known[-1]}."
        )
    return text  # type: ignore[return-value]


GATED: tuple[Tier, ...] = ("oblivious", "adaptive")  # tiers that the gate looks at, where none are named


def gates(rows: Sequence[Row], fail_on: FailOn, tiers: Sequence[str] = GATED) -> dict[str, Gate]:
    """Return the gate of each defence; the undefended update has one only where no defence was audited.

    A defence *fails* when an attack of a server of these tiers gets that much of the images, or more; with *unproved*
    when images are recognised, or when nothing is proved of it. It *passes* when the servers of each fell short with an
    attack whose control succeeded. Else it is *uninformative*: attacks fail without a defence too, could not run, had
    no time, its declaration is wrong, or there was no truth to measure against.
    """
    named = dict.fromkeys(row["defense"] for row in rows if "defense" in row)
    names = [name for name in named if name != "none"] or ["none"]
    judged = {v.defense: v for v in verdicts(rows)}
    return {name: _gate(name, rows, fail_on, tiers, judged.get(name)) for name in names}


def overall(each: dict[str, Gate]) -> Gate:
    """Return the gate of the whole audit: that of its worst defences."""
    result = max((gate.result for gate in each.values()), key=SEVERITY.index)
    return Gate(result, "; ".join(f"{name}: {g.why}" for name, g in each.items() if g.result == result))


def _gate(name: str, rows: Sequence[Row], fail_on: FailOn, tiers: Sequence[str], judged: Verdict | None) -> Gate:
    mine = [x for x in lines(rows) if x.defense == name and x.at_own_weights and x.tier in tiers]
    limit = GRADES.index("recognised" if fail_on == "unproved" else fail_on)
    if got := [line for line in mine if GRADES.index(line.grade) >= limit]:
        worst = max(got, key=lambda line: line.strength)
        return Gate("failed", f"{worst.grade} by {worst.attack} ({worst.server} server, {worst.round} round)")
    proved = proved_of(rows, name)
    if fail_on == "unproved" and not proved.holds:
        return Gate("failed", proved.text)
    if judged is not None and judged.errors:
        return Gate("uninformative", f"its declaration is wrong: {judged.errors[0].rstrip('.')}")
    if late := _out_of_time(name, rows, mine):
        return Gate("uninformative", f"the time was over before {late} of the attacks on it were done")
    has_servers = any(row["kind"] == "defense" and row["defense"] == name for row in rows)
    for tier in tiers:
        its, server = [line for line in mine if line.tier == tier], f"the {WHO[tier].lower()}"  # type: ignore[index]
        if not its and (has_servers or tier == "oblivious"):
            return Gate("uninformative", f"nothing that {server} got could be measured")
        if its and all(line.void for line in its):
            return Gate("uninformative", f"no attack of {server} has a control that succeeded")
    if judged is not None and judged.outcome == "not_assessed":
        return Gate("uninformative", "what is secret in it is neither declared nor found")
    empty = [number for (number,), its in group(mine, "round").items() if all(line.void for line in its)]
    but = f", but the {' and '.join(empty)} round shows nothing either way" if empty else ""
    which = "recognised" if fail_on == "unproved" else fail_on
    return Gate("passed", f"not {which} by any attack, with controls that succeeded{but}; {proved.said}")


def _out_of_time(name: str, rows: Sequence[Row], mine: Sequence[Line]) -> int:
    """Return how many attacks on a defence were not tried for lack of time, or were stopped before they were done."""
    late = [row for row in rows if row["kind"] == "skip" and row["defense"] == name and row.get("out_of_time")]
    left = group(late, "round", "server", "attack").keys() - group(mine, "round", "server", "attack").keys()
    return len(left) + sum(line.out_of_time > 0 for line in mine)


MEASURED = ("defense", "mu_proved", "mu_measured", "low", "high", "verdict", "reasons", "why")
SCHEMA = 1  # of the layout: a key that goes or changes its meaning raises it, a new key does not


def summary(found: "Audit", page: Path, fail_on: FailOn | None, tiers: Sequence[str] = GATED) -> dict[str, Any]:
    """Return all that a program may ask of an audit."""
    floor, measured = best_floor(found.rows), [r for r in found.rows if r.get("certificate") == "measured"]
    return {
        "schema": SCHEMA,
        "versions": found.store.versions,
        "settings": found.store.settings,
        "folder": str(found.folder),
        "report": str(page),
        "client": next((row for row in found.rows if row["kind"] == "client"), None),
        "errors": declaration_errors(found.rows) + figure_errors(found.rows),
        "headline": found.headline,
        "gate": None if fail_on is None else _gate_summary(found.rows, fail_on, tiers),
        "floor": floor and _floor(floor),
        "verdicts": [_verdict(v) for v in found.verdicts],
        "measured": [{key: row[key] for key in MEASURED if key in row} for row in measured],
        "lines": [_line(line) for line in found.lines],
        "not_run": not_run(found.rows),
        "notes": [row["says"] for row in found.rows if row["kind"] == "note"],
    }


def not_run(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return what was wanted and could not be run, with the number of clients and why."""
    keys = ("round", "weights", "defense", "server", "attack", "why")
    skipped = group([row for row in rows if row["kind"] == "skip"], *keys)
    return [dict(zip(keys, values, strict=True)) | {"clients": len(its)} for values, its in skipped.items()]


def left_out(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what was wanted and not run, each with why: a line for each attack, round and reason."""
    found = [("training", row["says"].rstrip(".")) for row in rows if row["kind"] == "note"]
    found += [(f"{article(row['tier'])} {row['tier']} server", row["why"]) for row in rows if row["kind"] == "tier"]
    for (attack, round_, why), its in group(not_run(rows), "attack", "round", "why").items():
        where = ", ".join(dict.fromkeys(part["defense"] for part in its))
        count = sum(part["clients"] for part in its)
        when = f"{round_} round" if round_ != "update" else "the update"
        found.append(
            (f"{attack} on {where} ({when}, {count} {'attack' if count == 1 else 'attacks'})", why.rstrip("."))
        )
    return found


def _gate_summary(rows: Sequence[Row], fail_on: FailOn, tiers: Sequence[str]) -> dict[str, Any]:
    each = gates(rows, fail_on, tiers)
    whole = overall(each)
    said = {"fail_on": fail_on, **asdict(whole), "exit_code": EXIT_CODES[whole.result]}
    return said | {"defenses": [{"defense": name} | asdict(gate) for name, gate in each.items()]}


def _floor(floor: Floor) -> dict[str, Any]:
    errors = {"error": asdict(floor.error), "mse": asdict(floor.mse)}
    return {"guess": floor.guess, **errors, "identified": _share(floor.identified)}


def _verdict(v: Verdict) -> dict[str, Any]:
    tiers = [asdict(t) | {"line": t.line and _line(t.line)} for t in v.tiers]
    both = {"oblivious": v.oblivious and _line(v.oblivious), "adaptive": v.adaptive and _line(v.adaptive)}
    return asdict(v) | both | {"tiers": tiers}


def _line(line: Line) -> dict[str, Any]:
    shares = {name: _share(getattr(line, name)) for name in ("recovered", "identified", "label")}
    return asdict(line) | {"verdict": line.grade if line.counts else "void"} | shares


def _share(share: Interval) -> dict[str, Any]:
    return asdict(share) | {"hits": share.hits if share.count else 0}
