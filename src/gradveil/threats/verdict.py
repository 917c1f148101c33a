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

from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import TIERS, Tier
from gradveil.pace import as_clock
from gradveil.threats.proof import NOTHING_PROVED, Proved, proved_of
from gradveil.threats.rows import (
    GRADES,
    Floor,
    Line,
    MeasuredExample,
    best_floor,
    group,
    lines,
    modality_of,
    read,
)
from gradveil.threats.words import DIAGNOSTIC, UNDETECTABLE, WHO, accuracy_text, article, gets, plural, resists

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
    name = case.name
    oblivious, adaptive = oblivious_and_adaptive(case.found, name)
    tiers = tuple(case.verdict(tier) for tier in TIERS)
    judged = {t.tier: t for t in tiers}
    main = judged["oblivious" if name == "none" else "adaptive"]
    outcome = main.outcome
    if name != "none" and outcome == "not_run":  # the server that counts was not tried
        got = judged["oblivious"].outcome
        outcome = got if got in ("recovered", "recognised", "traces", "void") else "not_run"
    points = [("Any server" if name == "none" else WHO["oblivious"], judged["oblivious"].text)]
    points += [(WHO[t.tier], t.text) for t in tiers[1:] if name != "none" or (t.line and t.tier in BEYOND)]
    if name in accuracy:
        points.append((scored_by[0].upper() + scored_by[1:], accuracy_text(name, accuracy, scored_by)))
    text = f"{'Any server' if name == 'none' else 'The oblivious server'} {judged['oblivious'].text}"
    if name != "none":
        joined = "but" if oblivious is not None and adaptive is not None and _worse(adaptive, oblivious) else "and"
        text += f", {joined} a server that knows the defence {judged['adaptive'].text}"
    for tier in BEYOND:
        if judged[tier].line is not None:
            text += f". {article(tier).capitalize()} {tier} server {judged[tier].text}"
    easier = strongest(line for line in case.found if line.weights == DIAGNOSTIC)
    if name == "none" and easier is not None:
        told = gets(easier, case.floor, "oblivious")
        points.insert(1, ("Diagnostic", f"in evaluation mode, which is not what was configured, any server {told}"))
        text += f". Diagnostic: {points[1][1]}"
    if missing := [t.tier for t in tiers if t.outcome == "not_run"]:
        text += f". Not run: {', '.join(missing)}" if name != "none" else ""
    text += f". {points[-1][0]} {points[-1][1]}." if name in accuracy else "."
    both = accuracy.get(name), accuracy.get("none")
    found = (name, outcome, text, tuple(points), oblivious, adaptive, *both, scored_by, tiers)
    verdict = Verdict(*found, case.proved, case.errors)
    return verdict if name == "none" else replace(verdict, text=f"{text} {found_and_proved(verdict)}.")


def found_and_proved(verdict: Verdict) -> str:
    """Return both axes in one line: that nothing was found, where it is so; then what is proved."""
    proved = verdict.proved
    found = "Nothing found by this panel; " if verdict.found == "nothing" else ""
    line = found + proved.said if found else proved.said[0].upper() + proved.said[1:]
    return line if proved.holds or not found else f"{line}. {UNDETECTABLE.rstrip('.')}"


def _worse(a: Line, b: Line) -> bool:
    return GRADES.index(a.grade) > GRADES.index(b.grade)
