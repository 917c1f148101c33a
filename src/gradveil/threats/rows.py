"""From rows to lines: one attack by one server on one defence, over all examples, judged by stated rules."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

from gradveil.countermeasures import TIERS, Tier
from gradveil.files import Row
from gradveil.metrics import Interval, chance_of, interval, rate, short
from gradveil.modalities import IMAGE, MODALITIES, Modality

Grade = Literal["recovered", "recognised", "traces", "nothing"]
GRADES: tuple[Grade, ...] = ("nothing", "traces", "recognised", "recovered")  # from harmless to worst

OBLIVIOUS = "oblivious"  # the server that does not know the defence
RECOVERED = 0.1  # of the blind guess's error: under it an example counts as recovered
HALF = 0.5  # of the examples
SIGNIFICANT = 0.01  # more identifications than chance explains at this level


@dataclass(frozen=True)
class MeasuredExample:
    """One example that came back, measured: by an attack, or by a blind guess. NaN: not known."""

    example: int
    mse: float = math.nan
    psnr: float = math.nan
    ssim: float = math.nan
    fft: float = math.nan
    label: float = math.nan
    identified: float = math.nan
    error: float = math.nan  # the modality's: of images, the MSE
    confidence: Sequence[float] = ()  # of the attack itself, cell by cell, where it says so
    own: Mapping[str, float] = field(default_factory=dict)  # what else the modality measures, by name
    guess: str = ""  # which blind guess; all that follows is an attack's
    round: str = ""  # "first" or "last"; "update" where one saved update was audited
    round_number: int = 0
    weights: str = ""  # the federation whose model was attacked
    defense: str = ""
    server: str = ""
    tier: Tier = "oblivious"  # of the server
    attack: str = ""
    converged: bool = False
    out_of_time: bool = False  # the attack was stopped before it was done
    stopped_at: int = 0  # after so many steps
    gallery: int = 1  # examples that the original stands among
    unit: str = ""  # of the run folder, whose images hold the reconstruction at ``index``
    index: int = 0

    @property
    def known(self) -> bool:
        """Whether there was a truth to measure against."""
        return not math.isnan(self.error)


def read(rows: Iterable[Row], kind: Literal["attack", "floor"]) -> list[MeasuredExample]:
    """Return the measured examples of a run: of its attacks, or of the blind guesses."""
    rows = list(rows)
    modality = modality_of(rows)
    names = [f.name for f in fields(MeasuredExample)]
    others = [name for name in modality.metrics if name not in names]
    found = []
    for row in rows:
        if row["kind"] == kind:
            values: Row = {name: math.nan if row[name] is None else row[name] for name in names if name in row}
            late = "out_of_time" in row.get("details", {})
            values["error"] = math.nan if row[modality.error] is None else row[modality.error]
            values["own"] = {name: math.nan if row.get(name) is None else row[name] for name in others}
            values.setdefault("tier", tier_of(row.get("server", "")))
            found.append(MeasuredExample(**values, out_of_time=late))
    return found


def modality_rows(modality: Modality) -> list[Row]:
    """Return what a run folder keeps of what its examples are; of images nothing, as ever."""
    return [] if modality == IMAGE else [{"kind": "modality", "modality": modality.spec_name, **modality.row()}]


def modality_of(rows: Iterable[Row]) -> Modality:
    """Return what the examples of a run are."""
    said = next((row for row in rows if row["kind"] == "modality"), None)
    return IMAGE if said is None else MODALITIES.get(said["modality"]).from_row(said)


def tier_of(server: str) -> Tier:
    """Return the tier of a server where a row does not name it: earlier versions had two."""
    return "oblivious" if server in (OBLIVIOUS, "") else "adaptive"


@dataclass(frozen=True)
class Floor:
    """The best blind guess: the one with the lowest mean error over the examples."""

    guess: str
    error: Interval
    mse: Interval
    identified: Interval
    by_example: dict[int, float]  # its error on each example
    modality: Modality = IMAGE  # what an example is


@dataclass(frozen=True)
class Line:
    """What one attack by one server gets of one defence's updates in one round."""

    round: str  # "first" or "last"
    defense: str
    weights: str  # the federation whose model was attacked
    server: str
    tier: Tier
    attack: str
    error: Interval  # the modality's: of images, the MSE
    mse: Interval
    worst: float  # error of the example that came back best: the worst record
    psnr: Interval
    ssim: Interval
    fft: Interval
    label: Interval
    identified: Interval
    recovered: Interval  # share of examples with an error under a tenth of the blind guess's
    converged: int
    out_of_time: int  # attacks on it, or on its control, that were stopped before they were done
    grade: Grade
    control: float | None  # mean error of the same attack, examples and weights without a defence
    void: str | None  # why a failure here proves nothing; None where its control succeeded and it was not cut short
    gallery: int
    own: dict[str, Interval] = field(default_factory=dict)  # what else the modality measures, by name

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from the other lines of its round."""
        return self.weights, self.defense, self.tier, self.server, self.attack

    def metric(self, name: str) -> Interval:
        """Return what the modality measures under a name."""
        value: Interval = self.own[name] if name in self.own else getattr(self, name)
        return value

    @property
    def from_list(self) -> bool:
        """Whether its answer was picked from a list of candidates."""
        return is_listed(self.attack)

    @property
    def at_own_weights(self) -> bool:
        """Whether the model is not one trained under another defence, as a control's may be."""
        return self.defense != "none" or self.weights in ("none", "start")

    @property
    def counts(self) -> bool:
        """Whether the line says something: an attack that got something always does, a failure if not void."""
        return self.grade != "nothing" or self.void is None

    @property
    def strength(self) -> tuple[int, float, float]:
        """How much was got; for finding the strongest line."""
        return GRADES.index(self.grade), self.recovered.mean + self.identified.mean, -self.error.mean


T = TypeVar("T")


def group(rows: Iterable[T], *keys: str) -> dict[tuple[Any, ...], list[T]]:
    """Return rows by the values of these keys, or fields, in the order in which each combination first comes."""
    groups: dict[tuple[Any, ...], list[T]] = {}
    for row in rows:
        values = tuple(row[key] if isinstance(row, Mapping) else getattr(row, key) for key in keys)
        groups.setdefault(values, []).append(row)
    return groups


def best_floor(rows: Iterable[Row]) -> Floor | None:
    """Return the best of the blind guesses, or nothing where the truth is not known."""
    rows = list(rows)
    modality = modality_of(rows)
    floors = [
        Floor(
            guess,
            _mean(mine, "error"),
            _mean(mine, "mse"),
            _share(mine, "identified"),
            {m.example: m.error for m in mine},
            modality,
        )
        for (guess,), mine in group(read(rows, "floor"), "guess").items()
    ]
    return min(floors, key=lambda floor: floor.error.mean, default=None)


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return every line with its control's verdict: by round, by defence (none first), the oblivious server first."""
    floor = best_floor(rows)
    if floor is None:
        return []
    known = [m for m in read(rows, "attack") if m.known]
    controls = group([m for m in known if m.defense == "none"], "round", "weights", "attack", "tier")
    found = [
        _line(mine, _control_of(mine[0], controls), floor)
        for mine in group(known, "round", "weights", "defense", "tier", "server", "attack").values()
    ]
    rounds = list(dict.fromkeys(line.round for line in found))
    names = list(dict.fromkeys(["none", *(row["defense"] for row in rows if "defense" in row)]))
    return sorted(found, key=lambda x: (rounds.index(x.round), names.index(x.defense), TIERS.index(x.tier)))


def _control_of(
    one: MeasuredExample, controls: Mapping[tuple[Any, ...], list[MeasuredExample]]
) -> list[MeasuredExample] | None:
    """Return the same attack without a defence: by a server of the same tier, else by the first with less to go on."""
    place = (one.round, one.weights, one.attack)
    return next(
        (controls[*place, tier] for tier in (one.tier, "oblivious", "adaptive") if (*place, tier) in controls), None
    )


def grade(
    error: Interval, recovered: Interval, identified: Interval, floor: Floor, gallery: int, listed: bool = False
) -> Grade:
    """Say what was got.

    *recovered*: at least half of the examples come back with under a tenth of the blind guess's error;
    *recognised*: at least half pick their original out of the gallery, more than chance explains; *traces*: some
    example was recovered, or more were identified than chance explains, or the mean error is under half of the blind
    guess's; *nothing*: none of these. More than chance: the exact interval's lower end (one-sided, 99 %) lies above
    one over the size of the gallery, that is, a binomial test at 1 % says so. An answer that was picked from a list is
    exact where the pick is right, so that the picks alone decide.
    """
    luck = chance_of(identified.hits, identified.count, 1 / gallery) if identified.count else 1.0
    if listed:
        return ("recognised" if identified.mean >= HALF else "traces") if luck < SIGNIFICANT else "nothing"
    if recovered.mean >= HALF:
        return "recovered"
    if luck < SIGNIFICANT and identified.mean >= HALF:
        return "recognised"
    if recovered.mean > 0 or error.mean < HALF * floor.error.mean or luck < SIGNIFICANT:
        return "traces"
    return "nothing"


def is_listed(attack: str) -> bool:
    """Return whether an attack picks its answer from a list of candidates."""
    return attack.partition(":")[0] == "candidates"


def _line(mine: Sequence[MeasuredExample], control: Sequence[MeasuredExample] | None, floor: Floor) -> Line:
    one = mine[0]
    error, recovered, identified = _basics(mine, floor)
    got = grade(error, recovered, identified, floor, one.gallery, is_listed(one.attack))
    late = sum(m.out_of_time for m in mine)
    void = _void(control, floor)
    if void is None and late and got == "nothing" and not _as_long(mine, control):
        void = f"ran out of time on {late} of {len(mine)}"
    same: dict[str, Any] = {n: getattr(one, n) for n in ("round", "defense", "weights", "server", "tier", "attack")}
    return Line(
        **same,
        **{name: _mean(mine, name) for name in ("mse", "psnr", "ssim", "fft")},  # type: ignore[arg-type]
        error=error,
        worst=min(m.error for m in mine),
        label=_share(mine, "label"),
        identified=identified,
        recovered=recovered,
        converged=sum(m.converged for m in mine),
        out_of_time=late + sum(m.out_of_time for m in control or () if control is not mine),
        grade=got,
        control=None if control is None else _mean(control, "error").mean,
        void=void,
        gallery=one.gallery,
        own={name: interval([m.own[name] for m in mine]) for name in one.own},
    )


def _basics(mine: Sequence[MeasuredExample], floor: Floor) -> tuple[Interval, Interval, Interval]:
    recovered = rate([float(m.error < RECOVERED * floor.by_example[m.example]) for m in mine])
    return _mean(mine, "error"), recovered, _share(mine, "identified")


def _void(control: Sequence[MeasuredExample] | None, floor: Floor) -> str | None:
    """Return why the attack's failures prove nothing, or None where its control succeeded.

    The control succeeds when the attack recovers, or picks out of the gallery, at least half of the examples from
    undefended updates at the same weights, and not by chance.
    """
    if control is None:
        return "there is no undefended control to compare with"
    error, recovered, identified = _basics(control, floor)
    listed = is_listed(control[0].attack)
    got = grade(error, recovered, identified, floor, control[0].gallery, listed)
    if got in ("recovered", "recognised"):
        return None
    if is_listed(control[0].attack):
        late = sum(m.out_of_time for m in control)
        picked = (
            f"{identified.hits} of {identified.count} picked rightly out of {control[0].gallery}, as chance explains"
        )
        return f"fails without any defence too: {f'out of time on {late} of {len(control)}' if late else picked}"
    return (
        f"fails without any defence too: {why_it_failed(control)}, {floor.modality.error_name} {error.mean:.2g} "
        f"against {floor.error.mean:.2g} for a blind guess, {recovered.hits} of {recovered.count} recovered"
    )


def _as_long(mine: Sequence[MeasuredExample], control: Sequence[MeasuredExample] | None) -> bool:
    """Return whether an attack that was stopped had as many steps as its control, which was stopped as well."""
    enough = min((m.stopped_at for m in control or () if m.out_of_time), default=math.inf)
    return all(m.stopped_at >= enough > 0 for m in mine if m.out_of_time)


def why_it_failed(mine: Sequence[MeasuredExample]) -> str:
    """Return why an attack got nothing from an undefended update, as far as it can be told."""
    stuck, late = sum(not m.converged for m in mine), sum(m.out_of_time for m in mine)
    if late:
        return f"out of time on {late} of {len(mine)}"
    return f"did not converge on {stuck} of {len(mine)}" if stuck else "found another answer"


def _mean(mine: Iterable[MeasuredExample], name: str) -> Interval:
    return interval([getattr(m, name) for m in mine])


def _share(mine: Iterable[MeasuredExample], name: str) -> Interval:
    return rate([getattr(m, name) for m in mine])


PROVED = ("floor", "guess")  # for every server, the floor for Gaussian images: an attack beyond one is an error
FAR = 0.5  # of a figure: what lies under that with its whole 95 % interval contradicts it
LUCK = 1e-3  # how unlikely so many right picks must be under a guess bound, to contradict it
VACUOUS = 0.99  # a chance that is no limit
NAMES = {
    "local": "the paper's theorem 1",
    "global": "the Lipschitz bound",
    "floor": "the Gaussian floor",
    "guess": "the guess bound",
    "measured": "the measured μ",
}


@dataclass(frozen=True)
class Proved:
    """The certificate that holds for a defence over the whole run, or that there is none."""

    holds: bool = False
    text: str = "nothing is proved"
    conditions: tuple[str, ...] = ()  # under which it holds

    @property
    def said(self) -> str:
        """The same, as what follows a finding."""
        return f"proved: {self.text}" if self.holds else self.text


NOTHING_PROVED = Proved()


def proved_of(rows: Sequence[Row], defense: str) -> Proved:
    """Return what limits every server of a defence: the guess bound over the whole run, where nothing contradicts it.

    Figures of single layers and of the leak meter limit some servers only, the Gaussian floor is for Gaussian images.
    """
    mine = [row for row in rows if row["kind"] == "certificate" and row["defense"] == defense]
    bound = next((row for row in mine if row["certificate"] == "guess" and row["layer"] == "the whole run"), None)
    if bound is None:
        failed = next((row for row in mine if row["certificate"] == "floor" and not row["sound"]), None)
        return NOTHING_PROVED if failed is None else Proved(text=f"nothing is proved: {failed['says'].rstrip('.')}")
    if any(row["kind"] == "probe" and row["defense"] == defense and row["errors"] for row in rows):
        return Proved(text="nothing is proved: its declaration is wrong")
    if wrong := [text for row, text in _errors(rows) if row["defense"] == defense and row["kind"] == "certificate"]:
        return Proved(text=f"nothing is proved: its promise was contradicted ({wrong[0].rstrip('.')})")
    if bound["chance"] is not None and bound["chance"] > VACUOUS:
        said = f"nothing is proved that limits a server: {bound['says'][0].lower()}{bound['says'][1:].rstrip('.')}"
        return Proved(text=said)
    says = bound["says"].rstrip(".")
    return Proved(True, f"over the whole run, {says[0].lower()}{says[1:]}", tuple(bound["assumptions"]))


def beaten_figures(rows: Sequence[Row]) -> list[tuple[Row, Line]]:
    """Return each figure under which an attack on one update got, at the same weights, with that attack."""
    found = [x for x in lines(rows) if x.round == "first" and x.tier in ("oblivious", "adaptive") and x.at_own_weights]
    pairs = []
    for row in rows:
        if row.get("certificate") in PROVED:
            pairs += [(row, line) for line in _beyond(row, rows)[:1]]
        elif row["kind"] in ("certificate", "meter") and row["mse"] is not None:
            under = [x for x in found if x.defense == row["defense"] and x.mse.mean < row["mse"]]
            pairs += [(row, min(under, key=lambda x: x.mse.mean))] if under else []
    return pairs


def _beyond(row: Row, rows: Sequence[Row]) -> list[Line]:
    """Return the attacks that contradict a floor or a guess bound beyond what luck explains, the strongest first."""
    bound = [x for x in lines(rows) if x.defense == row["defense"] and x.tier in row["tiers"] and x.at_own_weights]
    if row["certificate"] == "floor":
        under = [x for x in bound if row["mse"] is not None and x.mse.high < row["mse"]]
        return sorted(under, key=lambda x: x.mse.mean)
    if row["chance"] is None:
        return []
    picked = [x for x in bound if x.identified.count]
    size = next((int(one["examples"]) for one in rows if one["kind"] == "client"), 1)  # answers that one is picked from
    allowed = {True: row["chance"], False: min(1.0, size * row["chance"])}  # from a list; otherwise
    over = [x for x in picked if chance_of(x.identified.hits, x.identified.count, allowed[x.from_list]) < LUCK]
    return sorted(over, key=lambda x: -x.identified.mean)


def figure_errors(rows: Sequence[Row]) -> list[str]:
    """Return what is wrong with figures that speak of every server: an attack got far under them, or μ was measured
    above its promise.

    The meter's figure is an average over Gaussian images, to first order: on a few images an attack may come out
    somewhat below it, and on a single one far, which takes the figure off the page and is no error.
    """
    return [text for _, text in _errors(rows)]


def _errors(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    errors = [
        (row, f"{row['defense']} exceeds its promise: {'; '.join(row['reasons'])}. {row['mu_proved']:.3g} is proved.")
        for row in rows
        if row.get("certificate") == "measured" and row.get("reasons")
    ]
    for row, line in beaten_figures(rows):
        far = row["kind"] == "meter" and line.mse.count > 1 and line.mse.high < FAR * row["mse"]
        if row.get("certificate") in PROVED or far:
            figure = f"T{figure_name(row)[1:]}'s figure for {row['defense']} ({row.get('server') or row['layer']})"
            errors.append((row, f"{figure} does not hold: {beaten_by(row, line)}."))
    return errors


def beaten_by(row: Row, line: Line) -> str:
    """Return a figure and what an attack got beyond it."""
    if row.get("certificate") == "guess":
        return f"it says {short(row['chance'])}, and {line.attack} picked {line.identified.as_count}"
    return f"it says {short(row['mse'])}, and {line.attack} got {short(line.mse.mean)}"


def figure_name(row: Row) -> str:
    """Return what a figure is called."""
    return "the leak meter" if row["kind"] == "meter" else NAMES[row["certificate"]]
