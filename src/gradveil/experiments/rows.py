"""From rows to lines: one attack by one server on one defence, over all images, judged by stated rules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gradveil.experiments.run_folder import Row
from gradveil.metrics.intervals import Interval, chance_of, interval, rate

Grade = Literal["recovered", "recognised", "traces", "nothing"]
GRADES: tuple[Grade, ...] = ("nothing", "traces", "recognised", "recovered")  # from harmless to worst

NAIVE = "naive"  # the server that does not know the defence
RECOVERED = 0.1  # of the blind guess's error: under it an image counts as recovered
HALF = 0.5  # of the images
SIGNIFICANT = 0.01  # more identifications than chance explains at this level


@dataclass(frozen=True)
class Floor:
    """The best blind guess: the one with the lowest mean error over the images."""

    guess: str
    mse: Interval
    identified: Interval
    by_example: dict[int, float]  # its MSE on each image


@dataclass(frozen=True)
class Line:
    """What one attack by one server gets of one defence's updates in one round."""

    round: str  # "first" or "last"
    defense: str
    weights: str  # the federation whose model was attacked
    server: str
    attack: str
    mse: Interval
    psnr: Interval
    ssim: Interval
    fft: Interval
    label: Interval
    identified: Interval
    recovered: Interval  # share of images with an error under a tenth of the blind guess's
    converged: int
    grade: Grade
    control: float | None  # mean MSE of the same attack, images and weights without a defence
    void: str | None  # why a failure here proves nothing; None where its control succeeded
    gallery: int
    unit: str

    @property
    def counts(self) -> bool:
        """Whether the line says something: an attack that got something always does, a failure if not void."""
        return self.grade != "nothing" or self.void is None

    @property
    def strength(self) -> tuple[int, float, float]:
        """How much was got; for finding the strongest line."""
        return GRADES.index(self.grade), self.recovered.mean + self.identified.mean, -self.mse.mean


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
    by_guess: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "floor":
            by_guess.setdefault(row["guess"], []).append(row)
    found = [
        Floor(
            guess,
            interval([row["mse"] for row in group]),
            rate(_numbers(group, "identified")),
            {row["example"]: row["mse"] for row in group},
        )
        for guess, group in by_guess.items()
    ]
    return min(found, key=lambda floor: floor.mse.mean, default=None)


def lines(rows: Sequence[Row]) -> list[Line]:
    """Return every line with its control's verdict: by round, by defence (none first), the naive server first."""
    floor = best_floor(rows)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["kind"] == "attack" and row["mse"] is not None:
            key = tuple(row[name] for name in ("round", "weights", "defense", "server", "attack"))
            groups.setdefault(key, []).append(row)
    if floor is None:
        return []
    controls = {
        (round_, weights, attack): group
        for (round_, weights, defense, server, attack), group in groups.items()
        if (defense, server) == ("none", NAIVE)
    }
    found = [_line(key, group, controls.get((key[0], key[1], key[4])), floor) for key, group in groups.items()]
    rounds = list(dict.fromkeys(line.round for line in found))
    names = list(dict.fromkeys(["none", *(row["defense"] for row in rows if "defense" in row)]))
    return sorted(found, key=lambda x: (rounds.index(x.round), names.index(x.defense), x.server != NAIVE))


def grade(mse: Interval, recovered: Interval, identified: Interval, floor: Floor, gallery: int) -> Grade:
    """Say what was got.

    *recovered*: at least half of the images come back with under a tenth of the blind guess's error;
    *recognised*: at least half pick their original out of the gallery; *traces*: some image was recovered, or
    more were identified than chance explains (binomial test at 1 %), or the mean error is under half of the
    blind guess's; *nothing*: none of these.
    """
    if recovered.mean >= HALF:
        return "recovered"
    if identified.count and identified.mean >= HALF:
        return "recognised"
    if recovered.mean > 0 or mse.mean < HALF * floor.mse.mean or _beyond_chance(identified, gallery):
        return "traces"
    return "nothing"


def _beyond_chance(identified: Interval, gallery: int) -> bool:
    if not identified.count:
        return False
    hits = round(identified.mean * identified.count)
    return chance_of(hits, identified.count, 1 / gallery) < SIGNIFICANT


def _line(key: tuple[str, ...], group: Sequence[Row], control: Sequence[Row] | None, floor: Floor) -> Line:
    round_, weights, defense, server, attack = key
    mse, recovered, identified = _basics(group, floor)
    gallery = group[0]["gallery"]
    is_control = (defense, server) == ("none", NAIVE)
    return Line(
        round=round_,
        defense=defense,
        weights=weights,
        server=server,
        attack=attack,
        mse=mse,
        psnr=interval(_numbers(group, "psnr")),
        ssim=interval(_numbers(group, "ssim")),
        fft=interval(_numbers(group, "fft")),
        label=rate(_numbers(group, "label")),
        identified=identified,
        recovered=recovered,
        converged=sum(bool(row["converged"]) for row in group),
        grade=grade(mse, recovered, identified, floor, gallery),
        control=None if control is None else interval([row["mse"] for row in control]).mean,
        void=_void(group if is_control else control, floor),
        gallery=gallery,
        unit=group[0]["unit"],
    )


def _basics(group: Sequence[Row], floor: Floor) -> tuple[Interval, Interval, Interval]:
    mse = interval([row["mse"] for row in group])
    recovered = rate([float(row["mse"] < RECOVERED * floor.by_example[row["example"]]) for row in group])
    return mse, recovered, rate(_numbers(group, "identified"))


def _void(control: Sequence[Row] | None, floor: Floor) -> str | None:
    """Return why the attack's failures prove nothing, or None where its control succeeded.

    The control succeeds when the attack recovers, or picks out of the gallery, at least half of the images
    from undefended updates at the same weights.
    """
    if control is None:
        return "there is no undefended control to compare with"
    mse, recovered, identified = _basics(control, floor)
    if recovered.mean >= HALF or (identified.count and identified.mean >= HALF):
        return None
    stuck = sum(not row["converged"] for row in control)
    why = f"did not converge on {stuck} of {len(control)}" if stuck else "found another answer"
    return (
        f"fails without any defence too: {why}, MSE {mse.mean:.2g} against {floor.mse.mean:.2g} for a blind guess, "
        f"{round(recovered.mean * recovered.count)} of {recovered.count} recovered"
    )


def _numbers(group: Iterable[Row], name: str) -> list[float]:
    return [float("nan") if row[name] is None else float(row[name]) for row in group]
