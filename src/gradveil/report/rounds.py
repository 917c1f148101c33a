"""The page of a training run: per round and node what leaked, what was refused, what was spent."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gradveil.auditing.run_folder import ROUNDS, FolderError, Row, RunFolder, read_rows
from gradveil.integrations.monitor import NODES
from gradveil.privacy.bounds import epsilon_of
from gradveil.report.plain import in_plain_words

DELTA = 1e-5  # at which ε is told where the run does not say


def rounds_content(store: RunFolder) -> dict[str, Any]:
    """Return what the page of a training run shows."""
    rounds, settings = store.rounds, store.settings
    if not rounds:
        raise FolderError(f"{store.path / ROUNDS} has no rounds yet. Wait for the first, or look at the run's log.")
    nodes = read_rows(store.path / NODES, {"round": int})
    delta = float(settings.get("delta", DELTA))
    rows = [round_row(row, delta) for row in rounds]
    return {
        "title": "What this run sent, round by round",
        "subtitle": f"{settings.get('engine', 'gradveil')} run, {store.versions.get('date', '')}",
        "sentence": _sentence(rows, settings),
        "plain": _plain(rows, nodes),
        "advice": _advice(rows, nodes, settings),
        "rows": rows,
        "has": {name for row in rows for name, value in row.items() if value not in (None, "")},
        "nodes": [_node(row, delta) for row in nodes],
        "lines": _lines(rows),
        "settings": list({**settings, **store.versions}.items()),
    }


def round_row(row: Row, delta: float) -> Row:
    """Return what is told of a round, whichever engine wrote it."""
    mu = row.get("mu", math.sqrt(row["spent"]) if isinstance(row.get("spent"), (int, float)) else None)
    refused = {str(why): int(count) for why, count in dict(row.get("rejected") or {}).items()}
    return {
        "round": int(row["round"]),
        "accepted": int(row.get("accepted", 0)),
        "refused": sum(refused.values()),
        "why": ", ".join(f"{count} {why}" for why, count in refused.items()),
        "leak": row.get("leak-psnr"),
        "floor": row.get("leak-floor"),
        "node": row.get("leak-node"),
        "accuracy": row.get("accuracy"),
        "majority": row.get("majority"),
        "mu": mu,
        "epsilon": None if mu is None else row.get("epsilon", epsilon_of(float(mu), delta)),
        "halted": row.get("halted"),
    }


def _node(row: Row, delta: float) -> Row:
    spent = row.get("spent")
    mu = None if spent is None else math.sqrt(float(spent))
    known = ("round", "node", "kept", "reason", "examples", "defense", "noise", "leak_psnr", "leak_floor")
    return {name: row.get(name) for name in known} | {"mu": mu, "epsilon": mu and epsilon_of(mu, delta)}


def _sentence(rows: Sequence[Row], settings: Row) -> str:
    accepted, refused = (sum(row[name] for row in rows) for name in ("accepted", "refused"))
    parts = [f"{len(rows)} rounds: {accepted} updates were averaged and {refused} refused"]
    if leaks := [row for row in rows if row["leak"] is not None]:
        worst = max(leaks, key=lambda row: float(row["leak"]))
        floor = "" if worst["floor"] is None else f" (a blind guess: {worst['floor']:.1f} dB)"
        parts.append(f"the best copy of an example had {worst['leak']:.1f} dB, in round {worst['round']}{floor}")
    else:
        parts.append("no node measured a leak")
    if spent := [row for row in rows if row["mu"] is not None]:
        last, budget = spent[-1], settings.get("budget") or math.inf
        of = "" if math.isinf(budget) else f" of {budget:g}"
        delta = settings.get("delta", DELTA)
        parts.append(
            f"a record lost at most μ = {last['mu']:.3g}{of}, which is ε = {last['epsilon']:.3g} at δ = {delta:g}"
        )
    else:
        parts.append("nothing is promised of single records")
    return "; ".join(parts) + "."


def _plain(rows: Sequence[Row], nodes: Sequence[Row]) -> str:
    """Return what the run's promise means for one person."""
    mu = next((float(row["mu"]) for row in reversed(rows) if row["mu"] is not None), None)
    if mu is None:
        return ""
    simulated = any(row.get("noise") == "simulated" for row in nodes)
    lead = "The noise was simulated, which protects nobody. With secret noise: " if simulated else ""
    return f"{lead}{in_plain_words(mu)}"


def _advice(rows: Sequence[Row], nodes: Sequence[Row], settings: Row) -> str:
    if rows[-1]["halted"]:
        return str(rows[-1]["halted"])
    leaks = [row for row in rows if row["leak"] is not None and row["leak"] > (row["floor"] or 0) + 3]
    reasons = Counter(str(row["reason"]) for row in nodes if row.get("reason"))
    if leaks:
        return (
            f"Examples came out better than a blind guess in {len(leaks)} rounds. More examples a step, a secure sum "
            "or a defence of records (veil) changes that: gradveil plan says what each costs."
        )
    if reasons:
        why, count = reasons.most_common(1)[0]
        return f"Look at what was refused most: {count} replies for {why!r}."
    if max((row["mu"] or 0.0 for row in rows), default=0.0) > 2:
        return (
            "A record lost more than μ = 2, up to which no attack was measured to get nearer than a blind guess. More "
            "noise, fewer rounds, or telling which records a step is of (gradveil.counted) lowers it: gradveil plan."
        )
    if not settings.get("required") and nodes:
        return "No defence is required of the nodes. require_defense= refuses replies that do not state one."
    return "Nothing stands out. A leak check that finds nothing speaks of its own attack alone."


LINES = (  # of the chart: which number, on the scale of which, colour and words
    ("leak", ("leak", "floor"), "c7", "worst leak, dB"),
    ("floor", ("leak", "floor"), "c0", "blind guess, dB"),
    ("epsilon", ("epsilon",), "c1", "ε"),
)


def _lines(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of the chart by round: the leak and the blind guess (dB), and ε on a scale of its own."""
    first, last = rows[0]["round"], max(rows[-1]["round"], rows[0]["round"] + 1)
    lines = []
    for name, scale, colour, label in LINES:
        top = max((row[one] for row in rows for one in scale if row[one] is not None), default=None) or 1.0
        points = [(row["round"], max(float(row[name]), 0.0)) for row in rows if row[name] is not None]
        places = [(40 + 580 * (n - first) / (last - first), 160 - 130 * v / top) for n, v in points]
        if len(points) > 1:
            lines.append({"points": places, "colour": colour, "label": label, "top": top})
    return lines
