"""Several runs side by side: which settings differ, and what changed against the first of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradveil.auditing.run_folder import ROWS, FolderError, RunFolder
from gradveil.errors import GradveilError
from gradveil.files import wrap_parse_errors, write_atomically
from gradveil.metrics import Interval
from gradveil.report.page import NOT_AN_AUDIT, fill
from gradveil.report.plain import LAST_DIGIT, name_of
from gradveil.report.table import COLOURS
from gradveil.threats.rows import Floor, best_floor
from gradveil.threats.verdict import WHO, TierVerdict, Verdict, badges, score_text, verdicts

# from worst to best for a client; others cannot be ranked
OUTCOMES = ("recovered", "recognised", "identified", "traces", "nothing")
UNLIKE = ("minutes", "device", "meter_seconds", "data")  # settings that change how long it takes, not what is asked


class CompareError(GradveilError):
    """Runs that cannot be set side by side."""


@dataclass(frozen=True)
class ComparedRun:
    """What one run says."""

    name: str
    settings: dict[str, Any]
    schedule: str
    floor: Floor
    judged: dict[str, Verdict]


@dataclass(frozen=True)
class ComparedCell:
    """What one run says of one server and one defence."""

    outcome: str  # "absent" where the run does not have the defence, "score" where the line is of the score
    badge: str
    figure: str  # the error with its interval, and how many were identified
    change: str  # against the first run; nothing where there is none


@dataclass(frozen=True)
class ComparedLine:
    """One server and one defence, or what a defence costs, in every run."""

    spec: str
    who: str
    cells: list[ComparedCell]

    @property
    def shared(self) -> bool:
        """Whether more than one run has something to say."""
        return sum(cell.outcome not in ("absent", "not_run") for cell in self.cells) > 1


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; changes are against the first."""

    names: list[str]
    settings: list[tuple[str, list[str]]]  # that differ, with their values
    said: list[str]  # what changed, in sentences
    floors: list[str]
    lines: list[ComparedLine]


def compare(folders: Sequence[Path]) -> Comparison:
    """Set the verdicts of runs side by side; raises where they are of different things."""
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise CompareError("A folder is named twice. Name each run once.")
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    first = runs[0]
    for run in runs[1:]:
        _check_alike(first, run)
    keys = list(dict.fromkeys(key for run in runs for key in run.settings if key not in UNLIKE))
    differing = [(key, [_text(run.settings.get(key)) for run in runs]) for key in keys]
    differing.append(("the attacked client", [run.schedule for run in runs]))
    differing = [(key, values) for key, values in differing if len(set(values)) > 1]
    specs = list(dict.fromkeys(spec for run in runs for spec in run.judged))
    lines = [line for spec in specs for line in _lines(spec, runs)]
    names, floors = [run.name for run in runs], [f"{run.floor.guess} {run.floor.error}" for run in runs]
    return Comparison(names, differing, _said(names, differing, lines), floors, lines)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' last names, or as they were given where two are alike."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _read(folder: Path, name: str) -> ComparedRun:
    with wrap_parse_errors(folder / ROWS, FolderError, NOT_AN_AUDIT):
        store = RunFolder.open(folder)
        rows = store.rows
        floor, judged = best_floor(rows), verdicts(rows)
    if floor is None or not judged:
        raise CompareError(f"{folder} has no verdicts to compare: it is no audit whose truth is known. Leave it out.")
    client: dict[str, Any] = next((row for row in rows if row["kind"] == "client"), {})
    schedule = client.get("schedule", "one local step")
    return ComparedRun(name, store.settings, schedule, floor, {v.defense: v for v in judged})


def _check_alike(a: ComparedRun, b: ComparedRun) -> None:
    for what, x, y in (
        ("examples that are", a.floor.modality.many, b.floor.modality.many),
        ("the data set", a.settings.get("dataset"), b.settings.get("dataset")),
    ):
        if x != y:
            raise CompareError(
                f"{a.name} is of {what} {x} and {b.name} of {what} {y}: errors on different data cannot be compared. "
                "Compare runs on the same data."
            )


def _lines(spec: str, runs: Sequence[ComparedRun]) -> list[ComparedLine]:
    """Return a line for each server that some run tried, and one for the score."""
    judged = [run.judged.get(spec) for run in runs]
    found = []
    for place, who in enumerate(WHO.values()):
        tiers = [None if v is None else v.tiers[place] for v in judged]
        if any(t is not None and t.line is not None for t in tiers) and (spec, who) != ("none", WHO["adaptive"]):
            cells = [_cell(t, tiers[0], run.floor) for t, run in zip(tiers, runs, strict=True)]
            found.append(ComparedLine(spec, who if spec != "none" or place else "Any server", cells))
    if any(v is not None and v.accuracy is not None for v in judged):
        scored_by = next(v.scored_by for v in judged if v is not None)
        found.append(ComparedLine(spec, scored_by.capitalize(), [_score(v, judged[0]) for v in judged]))
    return found


def _cell(tier: TierVerdict | None, first: TierVerdict | None, floor: Floor) -> ComparedCell:
    kind = floor.modality
    if tier is None:
        return ComparedCell("absent", "–", "", "")
    figure = ""
    if tier.line is not None:
        figure = f"{kind.error_name} {tier.line.error}, identified {tier.line.identified.as_count}"
    return ComparedCell(tier.outcome, badges(kind)[tier.outcome], figure, _change(tier, first, floor))


def _change(tier: TierVerdict, first: TierVerdict | None, floor: Floor) -> str:
    if first is None or tier is first or "not_run" in (tier.outcome, first.outcome):
        return ""
    if tier.outcome != first.outcome:
        words = badges(floor.modality)
        said = f"{words[first.outcome]} → {words[tier.outcome]}"
        if tier.outcome in OUTCOMES and first.outcome in OUTCOMES:
            better = OUTCOMES.index(tier.outcome) > OUTCOMES.index(first.outcome)
            said += ", better for the client" if better else ", worse for the client"
        return said
    if tier.line is None or first.line is None:
        return ""
    apart = _apart(first.line.error, tier.line.error)
    exact = not floor.modality.is_share and max(first.line.error.high, tier.line.error.high) <= LAST_DIGIT
    return f"error {apart}, beyond both intervals" if apart and not exact else ""


def _apart(a: Interval, b: Interval) -> str:
    """Return whether a mean rose or fell by more than both intervals explain."""
    return "higher" if b.low > a.high else "lower" if b.high < a.low else ""


def _score(verdict: Verdict | None, first: Verdict | None) -> ComparedCell:
    score = None if verdict is None else verdict.accuracy
    if verdict is None or score is None:
        return ComparedCell("absent", "–", "", "")
    before = None if first is None or first is verdict else first.accuracy
    moved = "" if before is None or before == score else f"{100 * (score - before):+.1f} points"
    if moved and verdict.scored_by != "accuracy":
        moved = f"{score - (before or 0.0):+.3f}"
    return ComparedCell("score", score_text(score, verdict.scored_by), "", moved)


def _said(names: Sequence[str], differing: Sequence[tuple[str, list[str]]], lines: Sequence[ComparedLine]) -> list[str]:
    """Return what changed, in sentences: the settings first, since they may be why."""
    keys = ", ".join(key for key, _ in differing)
    said = [f"The runs differ in {keys}." if keys else "The runs have the same settings."]
    for place, name in enumerate(names[1:], start=1):
        told = [
            f"{name}, {name_of(line.spec)}, {line.who.lower()}: {line.cells[place].change}."
            for line in lines
            if line.cells[place].change and line.cells[place].outcome != "score"
        ]
        said += told or [f"{name}: no verdict changed, and no error moved beyond the intervals."]
    for place, name in enumerate(names):
        gone = dict.fromkeys(name_of(line.spec) for line in lines if line.cells[place].outcome == "absent")
        left = dict.fromkeys(line.who.lower() for line in lines if line.cells[place].outcome == "not_run")
        said += [f"Not in {name}: {'; '.join(gone)}."] if gone else []
        said += [f"Not tried in {name}, on some defence or all: {', '.join(left)}."] if left else []
    return said


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "–" if value is None else str(value)


def write_comparison(found: Comparison, path: Path) -> Path:
    """Draw the page, and return where it is."""
    write_atomically(path, fill("compare.html", {"found": found}).encode())
    return path


def comparison_table(found: Comparison) -> RenderableType:
    """Return what changed in sentences; under it, the verdicts that more than one run has, and the settings."""
    table = Table("defence, server", *found.names, box=None, pad_edge=False)
    before = ""
    for line in found.lines:
        if not line.shared:
            continue
        if line.spec != before:
            table.add_row(Text(name_of(line.spec), "bold"))
            before = line.spec
        first, *others = line.cells
        table.add_row(f"  {line.who}", _told(first), *(Text("the same") if x == first else _told(x) for x in others))
    parts: list[RenderableType] = [*map(Text, found.said), Text(), table]
    if found.settings:
        settings = Table("setting", *found.names, box=None, pad_edge=False)
        for key, values in found.settings:
            settings.add_row(key, *values)
        parts += [Text(), settings]
    return Group(*parts)


def _told(cell: ComparedCell) -> Text:
    text = Text(cell.badge, COLOURS.get(cell.outcome, ""))
    for more in (cell.figure, cell.change):
        text.append(f"\n{more}" if more else "", "dim")
    return text
