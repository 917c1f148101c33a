"""What the lines say, in plain words: what servers of each tier get of each defence, and by which attack.

A server can do what those of the tiers that it includes can: one that knows the defence may act as if it did not. So a
tier's verdict is that of the strongest line of its own and of the tiers it includes, and one tier's "nothing" never
stands for another's.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Literal

from gradveil.countermeasures import TIERS, Tier
from gradveil.files import Row
from gradveil.metrics import short
from gradveil.modalities import Modality
from gradveil.pace import as_clock
from gradveil.threats.rows import (
    GRADES,
    NOTHING_PROVED,
    OBLIVIOUS,
    Floor,
    Line,
    MeasuredExample,
    Proved,
    best_floor,
    group,
    lines,
    modality_of,
    proved_of,
    read,
)

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


def score_text(score: float, scored_by: str) -> str:
    """Return a score in words: a share, or R²."""
    return f"{score:.1%}" if scored_by == "accuracy" else f"{score:.3f}"


def article(tier: Tier) -> str:
    """Return the article of a tier's server."""
    return "an" if tier == "informed" else "a"


def plural(word: str, count: int) -> str:
    """Return the word for so many."""
    return word if count == 1 else word + "s"


Outcome = Literal["recovered", "recognised", "identified", "traces", "nothing", "void", "not_assessed", "not_run"]

GIVEN: tuple[Outcome, ...] = ("recovered", "recognised", "identified")  # the server knows which example it is

INCLUDES: dict[Tier, tuple[Tier, ...]] = {  # what a server of a tier can do
    "oblivious": ("oblivious",),
    "adaptive": ("oblivious", "adaptive"),
    "informed": ("oblivious", "adaptive", "informed"),
    "multi-round": ("oblivious", "adaptive", "multi-round"),
    "malicious": ("oblivious", "adaptive", "malicious"),
}

BEYOND: tuple[Tier, ...] = ("informed", "multi-round", "malicious")  # they know more than the defence, or do more


@dataclass(frozen=True)
class TierVerdict:
    """What servers of one tier get of a defence."""

    tier: Tier
    outcome: Outcome
    text: str  # what such a server gets
    line: Line | None  # the strongest of the tier and of those it includes
    oracle: float | None = None  # error where the truth picks the best of all its reconstructions for each example


@dataclass(frozen=True)
class Verdict:
    """What the audit found about one defence, and what is proved of it."""

    defense: str
    outcome: Outcome  # of the server that knows the defence; of any server where there is none
    text: str
    points: tuple[tuple[str, str], ...]  # the same, as who and what
    oblivious: Line | None  # the strongest line of a server that does not know the defence
    adaptive: Line | None  # and of one that does; it may act as if it did not
    accuracy: float | None  # on the test split, after the last round
    baseline: float | None  # the same without a defence
    scored_by: str = "accuracy"  # what these are: R² where targets are numbers
    tiers: tuple[TierVerdict, ...] = ()  # every tier, in order
    proved: Proved = NOTHING_PROVED
    errors: tuple[str, ...] = ()  # what its author declared and probing it contradicts

    @property
    def score(self) -> str:
        """What its training came to, beside that without a defence; nothing where nothing was trained."""
        own, plain = ("" if x is None else score_text(x, self.scored_by) for x in (self.accuracy, self.baseline))
        beside = f", against {plain} without a defence" if own and plain and self.defense != "none" else ""
        return own + beside

    @property
    def worst(self) -> TierVerdict | None:
        """The tier whose servers get most, and more than nothing."""
        order = (*GIVEN, "traces")
        leaks = [t for t in self.tiers if t.outcome in order]
        return min(leaks, key=lambda t: order.index(t.outcome), default=None)

    @property
    def found(self) -> Outcome:
        """What the strongest attack of any tier got; where none got anything, what that amounts to."""
        return self.outcome if self.worst is None else self.worst.outcome


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return one verdict per defence, in the order they were asked for."""
    floor, found = best_floor(rows), lines(rows)
    trained = sorted((row for row in rows if row["kind"] == "accuracy"), key=lambda row: row["round"])
    accuracy = {row["defense"]: row["accuracy"] for row in trained}  # the last round's stays
    skipped = [row["defense"] for row in rows if row["kind"] == "skip"]
    names = list(dict.fromkeys([*accuracy, *(line.defense for line in found), *skipped]))
    scored_by = next((row["scored_by"] for row in trained if "scored_by" in row), "accuracy")
    if floor is None:
        return []
    measured = [m for m in read(rows, "attack") if m.known]
    return [_verdict(_Case(name, found, floor, rows, measured), accuracy, scored_by) for name in names]


def declaration_errors(rows: Sequence[Row]) -> list[str]:
    """Return what is declared of a defence and is not so, as sentences: the first lines of a report."""
    said = (f"The declaration of {row['defense']} is wrong: {text}" for row in _probes(rows) for text in row["errors"])
    return list(dict.fromkeys(said))


def headline(rows: Sequence[Row]) -> str:
    """Return one sentence over the whole audit."""
    judged = verdicts(rows)
    tried = [v for v in judged if v.defense != "none"]
    blind, many = [m for m in read(rows, "attack") if not m.known], modality_of(rows).many
    if blind:
        return _without_truth(blind, judged, many)
    if not tried:
        return f"{judged[0].text}" if judged else "Nothing was attacked."
    broken = [v for v in tried if v.outcome in GIVEN]
    said = f"{len(broken)} of {len(tried)} {plural('defence', len(tried))} gave {many} away to this panel of attacks"
    fooled = [v for v in broken if v.oblivious is None or v.oblivious.grade == "nothing"]
    more = [v for v in broken if v not in fooled and v.oblivious and v.adaptive and _worse(v.adaptive, v.oblivious)]
    if fooled:
        said += f", {len(fooled)} of them only to a server that knows the defence"
    if more:
        said += f", {len(more)} of them more to a server that knows the defence than to one that does not"
    for tier in BEYOND:
        also = [v for v in tried if v not in broken and _of(v, tier) in GIVEN]
        if also:
            said += f"; {len(also)} more to {article(tier)} {tier} server"
    late = any(row["kind"] == "skip" and row.get("out_of_time") for row in rows)
    why = " or the time was over" if late or any(line.out_of_time for line in lines(rows)) else ""
    return said + _rest(tried, why) + (". The time was over before all was tried." if late else ".")


def _rest(tried: Sequence[Verdict], or_late: str) -> str:
    """Return what is said of the defences that gave nothing away."""
    count, said = Counter(v.outcome for v in tried), ""
    if held := sum(v.found == "nothing" for v in tried):
        sure = sum(v.found == "nothing" and v.proved.holds for v in tried)
        proof = "a bound is proved" if sure == held else f"a bound is proved of {sure} of them"
        said += f"; of {held} nothing was found by this panel, and {proof if sure else 'nothing is proved'}"
    if void := count["void"]:
        said += f"; {void} {plural('resist', 2 - (void > 1))} this budget, since attacks fail without a defence too"
        said += or_late
    if open_ := count["not_assessed"]:
        said += f"; {open_} could not be assessed"
    if open_ := count["not_run"]:
        said += f"; {open_} {'was' if open_ == 1 else 'were'} not reached"
    return said


def _without_truth(blind: Sequence[MeasuredExample], judged: Sequence[Verdict], many: str) -> str:
    content = sum(m.converged for m in blind)
    said = f"The truth was not given, so look at the {many}: {content} of {len(blind)} reconstructions converged."
    if not judged:
        return said + " There is no control either: a failure here would prove nothing."
    return f"{said} On public stand-ins at the same weights, without a defence: {judged[0].text}"


def strongest(found: Iterable[Line]) -> Line | None:
    """Return the line that got most; where none got anything, the best failure that counts."""
    counted = sorted(found, key=lambda line: (line.counts, line.strength))
    return counted[-1] if counted else None


def by_tier(found: Iterable[Line], defense: str) -> dict[Tier, Line | None]:
    """Return the strongest line of each tier, the tiers that it includes counted in; none where it has no own line."""
    mine = [line for line in found if line.defense == defense and line.at_own_weights]
    ran = {line.tier for line in mine}
    return {
        tier: strongest(line for line in mine if line.tier in INCLUDES[tier]) if tier in ran else None for tier in TIERS
    }


def oblivious_and_adaptive(found: Iterable[Line], defense: str) -> tuple[Line | None, Line | None]:
    """Return the strongest line of a server that does not know a defence, and of one that does."""
    best = by_tier(found, defense)
    return best["oblivious"], best["adaptive"]


def _of(verdict: Verdict, tier: Tier) -> Outcome:
    return next((t.outcome for t in verdict.tiers if t.tier == tier), "not_run")


def _probes(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == "probe"]


@dataclass(frozen=True)
class _Case:
    """One defence and all that was found."""

    name: str
    found: Sequence[Line]
    floor: Floor
    rows: Sequence[Row]
    measured: Sequence[MeasuredExample]  # by attacks

    @property
    def errors(self) -> tuple[str, ...]:
        """What is wrong with its declaration."""
        mine = (text for row in _probes(self.rows) if row["defense"] == self.name for text in row["errors"])
        return tuple(dict.fromkeys(mine))

    @cached_property
    def proved(self) -> Proved:
        """What is proved of it."""
        return proved_of(self.rows, self.name)

    @property
    def assessed(self) -> bool:
        """Whether a server that knows the defence was tried in full: all that is secret is declared, or was found."""
        mine = [row for row in _probes(self.rows) if row["defense"] == self.name]
        return not self.errors and all(row["assessed"] for row in mine)

    def verdict(self, tier: Tier) -> TierVerdict:
        """Return what servers of a tier get."""
        mine = [line for line in self.found if line.defense == self.name and line.at_own_weights]
        own, able = [line for line in mine if line.tier == tier], [x for x in mine if x.tier in INCLUDES[tier]]
        best = strongest(able)
        if not own and (control := self._failed_control(tier)) and (best is None or best.grade == "nothing"):
            return TierVerdict(tier, "void", f"{resists(control)}; {self._settles(control)}", None)
        if not own and not (tier == "adaptive" and best is not None and best.grade != "nothing"):
            return TierVerdict(tier, "not_run", self._not_run(tier), None)
        assert best is not None
        if best.grade == "nothing" and (open_ := self._void_part(tier, able)):
            best = open_  # a part of the audit failed for reasons of its own: no protection may be read off the rest
        return TierVerdict(tier, self._outcome(tier, best), self._text(tier, best), best, self._oracle(tier))

    def _void_part(self, tier: Tier, able: Sequence[Line]) -> Line | None:
        """Return the strongest line of a tier whose attacks all failed without a defence too; its own tier first."""
        halves = [strongest(x for x in able if x.tier == t) for t in reversed(INCLUDES[tier])]
        return next((line for line in halves if line is not None and not line.counts), None)

    def _oracle(self, tier: Tier) -> float:
        mine = [m for m in self.measured if m.defense == self.name and m.tier in INCLUDES[tier]]
        return fmean(min(m.error for m in its) for its in group(mine, "round", "example").values())

    def _outcome(self, tier: Tier, best: Line) -> Outcome:
        if best.grade != "nothing":
            return "identified" if best.from_list and best.grade != "traces" else best.grade
        if not best.counts:
            return "void"
        return "nothing" if tier == "oblivious" or self.assessed else "not_assessed"

    def _text(self, tier: Tier, best: Line) -> str:
        said = gets(best, self.floor, tier)
        if best.counts and best.grade == "nothing" and tier != "oblivious" and not self.assessed:
            why = "its declaration is wrong" if self.errors else "what is secret in it is not known"
            said += f"; that is no assessment, since {why}"
        if not best.counts:
            said += f"; {self._settles(best)}"
        elif best.grade == "nothing" and (others := self._tried(tier, best)):
            said += f"; tried as well: {', '.join(others)}"
        return said

    def _tried(self, tier: Tier, best: Line) -> list[str]:
        """Return the other attacks that failed where their controls succeeded."""
        mine = (x for x in self.found if x.defense == self.name and x.at_own_weights and x.tier in INCLUDES[tier])
        names = dict.fromkeys(x.attack.partition(":")[0] for x in mine if x.counts)
        return [name for name in names if name != best.attack.partition(":")[0]]

    def _failed_control(self, tier: Tier) -> Line | None:
        """Return the control whose failure kept servers of a tier from being tried."""
        skipped = [row for row in self.rows if row["kind"] == "skip" and row["defense"] == self.name]
        kept = {(row["round"], row["weights"], row["control_failed"]) for row in skipped
                if row.get("tier") == tier and "control_failed" in row}  # fmt: skip
        controls = (x for x in self.found if x.defense == "none" and (x.round, x.weights, x.attack) in kept)
        return next((x for x in controls if x.void is not None), None)

    def _settles(self, line: Line) -> str:
        """Return what would tell, where an attack and its control failed."""
        costs = [row for row in self.rows if row["kind"] == "cost"]
        whole = next((r for r in costs if line.attack in (r["attack"], r["short"])), costs[0] if costs else None)
        if whole is not None and (line.out_of_time or whole["short"] != whole["attack"]):
            name, seconds = whole["attack"].partition(":")[0], as_clock(whole["seconds"])
            took = f"{name}'s {whole['steps']} steps take about {seconds} for one update here"
            return f"what would settle it: more --minutes ({took}), or --device cuda"
        if line.out_of_time:
            return "what would settle it: more --minutes, or --device cuda"
        return (
            "what would settle it: an easier setting (--examples 1, one local step, the first round), or another attack"
        )

    def _not_run(self, tier: Tier) -> str:
        skipped = [row for row in self.rows if row["kind"] == "skip" and row["defense"] == self.name]
        skipped += [row for row in self.rows if row["kind"] == "tier"]  # of any defence
        own = [row for row in skipped if row.get("tier", "") == tier]
        why = [row["why"] for row in own if not row.get("out_of_time") and "control_failed" not in row]
        return f"was not run: {why[0].rstrip('.')}" if why else "was not reached in the time" if own else "was not run"


def _verdict(case: _Case, accuracy: Mapping[str, float], scored_by: str) -> Verdict:
    name, is_plain = case.name, case.name == "none"
    tiers = tuple(case.verdict(tier) for tier in TIERS)
    judged = {t.tier: t for t in tiers}
    outcome = judged["oblivious" if is_plain else "adaptive"].outcome
    if not is_plain and outcome == "not_run":  # the server that counts was not tried
        got = judged["oblivious"].outcome
        outcome = got if got in ("recovered", "recognised", "traces", "void") else "not_run"
    oblivious, adaptive = both = oblivious_and_adaptive(case.found, name)
    scores = accuracy.get(name), accuracy.get("none")
    verdict = Verdict(name, outcome, "", (), *both, *scores, scored_by, tiers, case.proved, case.errors)
    points = [("Any server" if is_plain else WHO["oblivious"], judged["oblivious"].text)]
    points += [(WHO[t.tier], t.text) for t in tiers[1:] if not is_plain or (t.line and t.tier in BEYOND)]
    text = f"{'Any' if is_plain else 'The oblivious'} server {judged['oblivious'].text}"
    if not is_plain:
        joined = "but" if oblivious is not None and adaptive is not None and _worse(adaptive, oblivious) else "and"
        text += f", {joined} a server that knows the defence {judged['adaptive'].text}"
    for tier in BEYOND:
        if judged[tier].line is not None:
            text += f". {article(tier).capitalize()} {tier} server {judged[tier].text}"
    easier = strongest(line for line in case.found if line.weights == DIAGNOSTIC)
    if is_plain and easier is not None:
        told = gets(easier, case.floor, "oblivious")
        points.insert(1, ("Diagnostic", f"in evaluation mode, which is not what was configured, any server {told}"))
        text += f". Diagnostic: {points[1][1]}"
    missing = [t.tier for t in tiers if t.outcome == "not_run"]
    text += f". Not run: {', '.join(missing)}." if missing and not is_plain else "."
    if verdict.score:
        points.append((scored_by[0].upper() + scored_by[1:], verdict.score))
        text += f" {points[-1][0]} {verdict.score}."
    text += "" if is_plain else f" {found_and_proved(verdict)}."
    return replace(verdict, text=text, points=tuple(points))


def found_and_proved(verdict: Verdict) -> str:
    """Return both axes in one line: that nothing was found, where it is so; then what is proved."""
    proved = verdict.proved
    found = "Nothing found by this panel; " if verdict.found == "nothing" else ""
    line = found + proved.said if found else proved.said[0].upper() + proved.said[1:]
    return line if proved.holds or not found else f"{line}. {UNDETECTABLE.rstrip('.')}"


def _worse(a: Line, b: Line) -> bool:
    return GRADES.index(a.grade) > GRADES.index(b.grade)
