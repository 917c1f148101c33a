"""The summary of an audit for programs, as ``docs/schemas/audit.json`` describes it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradveil.auditing.audit import Audit
from gradveil.auditing.gate import EXIT_CODES, GATED, FailOn, gates, overall
from gradveil.auditing.run_folder import Row
from gradveil.metrics.recovery import Interval
from gradveil.threats.proof import figure_errors
from gradveil.threats.rows import Line, best_floor, group
from gradveil.threats.verdict import Verdict, declaration_errors
from gradveil.threats.words import article

SCHEMA = 1  # of the layout: a key that goes or changes its meaning raises it, a new key does not


def summary(found: Audit, page: Path, fail_on: FailOn | None, tiers: Sequence[str] = GATED) -> dict[str, Any]:
    """Return all that a program may ask of an audit."""
    return {
        "schema": SCHEMA,
        "versions": found.store.versions,
        "settings": found.store.settings,
        "folder": str(found.folder),
        "report": str(page),
        "client": next((row for row in found.rows if row["kind"] == "client"), None),
        "errors": declaration_errors(found.rows) + figure_errors(found.rows),
        "headline": found.headline,
        "gate": None if fail_on is None else _gate(found.rows, fail_on, tiers),
        "floor": _floor(found.rows),
        "verdicts": [_verdict(v) for v in found.verdicts],
        "measured": [_measured(row) for row in found.rows if row.get("certificate") == "measured"],
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


def _gate(rows: Sequence[Row], fail_on: FailOn, tiers: Sequence[str]) -> dict[str, Any]:
    each = gates(rows, fail_on, tiers)
    whole = overall(each)
    said = {"fail_on": fail_on, **asdict(whole), "exit_code": EXIT_CODES[whole.result]}
    return said | {"defenses": [{"defense": name} | asdict(gate) for name, gate in each.items()]}


def _measured(row: Row) -> dict[str, Any]:
    keys = ("defense", "mu_proved", "mu_measured", "low", "high", "verdict", "reasons", "why")
    return {key: row[key] for key in keys if key in row}


def _floor(rows: Sequence[Row]) -> dict[str, Any] | None:
    floor = best_floor(rows)
    if floor is None:
        return None
    return {
        "guess": floor.guess,
        "error": asdict(floor.error),
        "mse": asdict(floor.mse),
        "identified": _share(floor.identified),
    }


def _verdict(v: Verdict) -> dict[str, Any]:
    lines = {
        name: None if line is None else _line(line)
        for name, line in (("oblivious", v.oblivious), ("adaptive", v.adaptive))
    }
    tiers = [asdict(t) | {"line": None if t.line is None else _line(t.line)} for t in v.tiers]
    return asdict(v) | lines | {"tiers": tiers}


def _line(line: Line) -> dict[str, Any]:
    shares = {name: _share(getattr(line, name)) for name in ("recovered", "identified", "label")}
    return asdict(line) | {"verdict": line.grade if line.counts else "void"} | shares


def _share(share: Interval) -> dict[str, Any]:
    return asdict(share) | {"hits": share.hits if share.count else 0}
