"""What the lines say, in plain words: what a server gets of each defence, and by which attack."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gradveil.experiments.rows import GRADES, NAIVE, Floor, Grade, Line, MeasuredExample, best_floor, lines, read
from gradveil.experiments.run_folder import Row
from gradveil.metrics.intervals import short

Outcome = Literal["recovered", "recognised", "traces", "nothing", "void"]

GETS: dict[str, str] = {
    "recovered": "gets the images back",
    "recognised": "gets images that can be told from {others} others",
    "traces": "gets traces of the images",
    "nothing": "gets nothing",
}

BADGES: dict[str, str] = {
    "recovered": "Images recovered",
    "recognised": "Images recognised",
    "traces": "Traces found",
    "nothing": "Nothing found",
    "void": "Void",
}


@dataclass(frozen=True)
class Verdict:
    """What the audit found about one defence."""

    defense: str
    outcome: Outcome  # of the strongest server
    text: str
    points: tuple[tuple[str, str], ...]  # the same, as who and what
    naive: Line | None  # the strongest line of a server that does not know the defence
    adaptive: Line | None  # and of one that does
    accuracy: float | None  # on the test split, after the last round
    baseline: float | None  # the same without a defence
    scored_by: str = "accuracy"  # what these are: R² where targets are numbers


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return one verdict per defence, in the order they were asked for."""
    floor, found = best_floor(rows), lines(rows)
    trained = sorted((row for row in rows if row["kind"] == "accuracy"), key=lambda row: row["round"])
    accuracy = {row["defense"]: row["accuracy"] for row in trained}  # the last round's stays
    skipped = [row["defense"] for row in rows if row["kind"] == "skip"]
    names = list(dict.fromkeys([*accuracy, *(line.defense for line in found), *skipped]))
    knowing = {row["defense"] for row in rows if row["kind"] == "defense"}
    scored_by = next((row["scored_by"] for row in trained if "scored_by" in row), "accuracy")
    return [_verdict(name, found, floor, accuracy, scored_by, name in knowing) for name in names if floor is not None]


def headline(rows: Sequence[Row]) -> str:
    """Return one sentence over the whole audit."""
    judged = verdicts(rows)
    tried = [v for v in judged if v.defense != "none"]
    blind = [m for m in read(rows, "attack") if not m.known]
    if blind:
        return _without_truth(blind, judged)
    if not tried:
        return f"{judged[0].text}" if judged else "Nothing was attacked."
    broken = [v for v in tried if v.outcome in ("recovered", "recognised")]
    said = f"{len(broken)} of {len(tried)} {_plural('defence', len(tried))} gave images away to this panel of attacks"
    fooled = [v for v in broken if v.naive is None or v.naive.grade == "nothing"]
    more = [v for v in broken if v not in fooled and v.naive and v.adaptive and _worse(v.adaptive, v.naive)]
    if fooled:
        said += f", {len(fooled)} of them only to a server that knows the defence"
    if more:
        said += f", {len(more)} of them more to a server that knows the defence than to one that does not"
    void = sum(v.outcome == "void" for v in tried)
    late = any(row["kind"] == "skip" and row.get("out_of_time") for row in rows)
    if void:
        why = " or the time was over" if late or any(line.out_of_time for line in lines(rows)) else ""
        said += f"; on {void} the audit is void, since attacks fail without a defence as well{why}"
    return said + (". The time was over before all was tried." if late else ".")


def _without_truth(blind: Sequence[MeasuredExample], judged: Sequence[Verdict]) -> str:
    content = sum(m.converged for m in blind)
    said = f"The truth was not given, so look at the pictures: {content} of {len(blind)} reconstructions converged."
    if not judged:
        return said + " There is no control either: a failure here would prove nothing."
    return f"{said} On public stand-ins at the same weights, without a defence: {judged[0].text}"


def strongest(found: Iterable[Line]) -> Line | None:
    """Return the line that got most; where none got anything, the best failure that counts."""
    counted = sorted(found, key=lambda line: (line.counts, line.strength))
    return counted[-1] if counted else None


def naive_and_adaptive(found: Iterable[Line], defense: str) -> tuple[Line | None, Line | None]:
    """Return the strongest line of a server that does not know a defence, and of one that does."""
    mine = [line for line in found if line.defense == defense and line.at_own_weights]
    return strongest(x for x in mine if x.server == NAIVE), strongest(x for x in mine if x.server != NAIVE)


def _verdict(
    name: str, found: Sequence[Line], floor: Floor, accuracy: dict[str, float], scored_by: str, has_knowing: bool
) -> Verdict:
    naive, adaptive = naive_and_adaptive(found, name)
    outcome = _outcome(naive, adaptive)
    if outcome == "nothing" and has_knowing and adaptive is None:
        outcome = "void"  # the server that counts was not tried
    points = [("Any server" if name == "none" else "Naive server", _gets(naive, floor))]
    if adaptive is not None or has_knowing:
        points.append(("Server that knows", _gets(adaptive, floor)))
    if name in accuracy:
        points.append((scored_by[0].upper() + scored_by[1:], _accuracy(name, accuracy, scored_by)))
    text = f"{'Any server' if name == 'none' else 'The naive server'} {_gets(naive, floor)}"
    if adaptive is not None or has_knowing:
        joined = "but" if naive is not None and adaptive is not None and _worse(adaptive, naive) else "and"
        text += f", {joined} a server that knows the defence {_gets(adaptive, floor)}"
    if outcome == "nothing":
        text += ". No attack of this panel got anything, which is no proof that none can"
    text += f". {points[-1][0]} {points[-1][1]}." if name in accuracy else "."
    both = accuracy.get(name), accuracy.get("none")
    return Verdict(name, outcome, text, tuple(points), naive, adaptive, *both, scored_by)


def _worse(a: Line, b: Line) -> bool:
    return GRADES.index(a.grade) > GRADES.index(b.grade)


def _outcome(naive: Line | None, adaptive: Line | None) -> Outcome:
    both = [line for line in (naive, adaptive) if line is not None and line.counts]
    if not both:
        return "void"
    worst: Grade = max((line.grade for line in both), key=GRADES.index)
    if worst == "nothing" and any(line is not None and not line.counts for line in (naive, adaptive)):
        return "void"  # one half of the audit failed for reasons of its own: no protection may be read off it
    return worst


def _gets(line: Line | None, floor: Floor) -> str:
    if line is None:
        return "was not tried"
    if not line.counts:
        return f"shows nothing either way: {_by(line)} {line.void}"
    gets = GETS[line.grade].format(others=line.gallery - 1)
    if line.grade == "recognised" and line.mse.mean > floor.mse.mean:
        gets = f"gets pictures that are poor pixel by pixel but can still be told from {line.gallery - 1} others"
    return f"{gets} ({_numbers(line, floor)}; {_by(line)}, {line.round} round)"


def _by(line: Line) -> str:
    name = line.attack.partition(":")[0]
    return name if line.server in (NAIVE, name) else f"{line.server} + {name}"


def _numbers(line: Line, floor: Floor) -> str:
    said = f"MSE {short(line.mse.mean)}"
    if line.mse.mean > floor.mse.mean:
        said += f", worse than a blind guess at {short(floor.mse.mean)}"
    elif line.grade == "nothing":
        said += f", little better than a blind guess at {short(floor.mse.mean)}"
    if line.server != NAIVE and line.control is not None:
        said += f", without a defence {short(line.control)}"
    if line.identified.count:
        said += f", identifies {line.identified.hits} of {line.identified.count}"
    return said


def _accuracy(name: str, accuracy: dict[str, float], scored_by: str) -> str:
    shown = {key: score_text(value, scored_by) for key, value in accuracy.items()}
    if name == "none" or "none" not in shown:
        return shown[name]
    return f"{shown[name]}, against {shown['none']} without a defence"


def score_text(score: float, scored_by: str) -> str:
    """Return a score in words: a share, or R²."""
    return f"{score:.1%}" if scored_by == "accuracy" else f"{score:.3f}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else word + "s"
