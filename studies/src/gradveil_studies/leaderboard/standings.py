"""From rows to the table: what each defence costs, what its strongest server gets, and what is promised."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from gradveil.auditing.run_folder import Row
from gradveil.countermeasures import TIERS, Tier
from gradveil.metrics import Interval, chance_of, interval
from gradveil.privacy.accountant import Account
from gradveil.threats.panel import INFORMED
from gradveil.threats.rows import SIGNIFICANT, Floor, Line, best_floor, group, lines, read
from gradveil_studies.leaderboard.attacks import ONE, PLANTED
from gradveil_studies.leaderboard.entries import BATCHES
from gradveil_studies.leaderboard.training import settled
from gradveil_studies.paper.rows import paired_loss, spread

DELTA = 1e-5
FLOOR = "floor for Gaussian images"  # a column


@dataclass(frozen=True)
class Price:
    """What training under a defence came to on one split."""

    accuracy: Interval  # over seeds: mean, lowest and highest
    points: float | None  # below the undefended runs of the same seeds
    lr: float  # that was chosen
    edge: bool  # whether it is the largest or smallest that was tried


@dataclass(frozen=True)
class Got:
    """What one attack by one server got of a defence, beside the blind guess."""

    line: Line
    error: Interval  # over records, as a share of the blind guess's: a ratio of means, as sure as the two go together
    worst: float  # of the record that came back best, as a share of the blind guess's error on it


@dataclass(frozen=True)
class Standing:
    """One row of the leaderboard."""

    dataset: str
    defense: str
    costs: dict[str, Price] = field(default_factory=dict)  # by split
    untrained: dict[str, str] = field(default_factory=dict)  # by split: why no run of it ended
    got: tuple[Got, ...] = ()
    planted: tuple[Got, ...] = ()  # by malicious servers, of a client of several records
    skipped: dict[Tier, str] = field(default_factory=dict)  # why a tier could not try
    account: Account | None = None  # of a record after the whole run
    measured: Interval | None = None  # μ, as a share of the proved one
    floor: float | None = None  # for Gaussian images, as a share of the blind guess's error
    blind: Floor | None = None
    time: float | None = None  # of a step, as a multiple of a plain one
    beaten: tuple[str, ...] = ()  # attacks that got below the certificate
    errors: tuple[str, ...] = ()  # what its author declares and is not so

    @property
    def strongest(self) -> Got | None:
        """The attack with the least error, of those that say something; no list of candidates is given."""
        told = [got for got in self.got if got.line.counts and got.line.attack != INFORMED]
        return min(told, key=lambda got: got.error.mean, default=None)

    @property
    def identified(self) -> Got | None:
        told = [got for got in self.got if got.line.counts]
        return max(told, key=lambda got: got.line.identified.mean, default=None)

    @property
    def worst(self) -> float | None:
        """The least error on one record by any attack without a list, as a share of the blind guess's."""
        return min((got.worst for got in self.got if got.line.attack != INFORMED), default=None)

    def tier(self, tier: Tier) -> str:
        """Return what the strongest server of a tier got, in a cell."""
        mine = [got for got in (*self.got, *self.planted) if got.line.tier == tier]
        told = [got for got in mine if got.line.counts]
        if not told:
            return "uninformative" if mine else f"not run: {self.skipped[tier]}" if tier in self.skipped else "not run"
        sought = [got for got in told if got.line.attack != INFORMED]
        best = max(told, key=lambda got: got.line.identified.mean)
        least = f"{min(got.error.mean for got in sought):.2f}, " if sought else ""
        return f"{least}{best.line.identified.mean:.0%}"


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Return all rows of the leaderboard, by data set, in the order of the entries."""
    found = []
    for (dataset,), mine in group(rows, "dataset").items():
        names = dict.fromkeys(row["defense"] for row in mine if "defense" in row)
        scenes = {scene: _scene(mine, scene) for scene in (ONE, PLANTED)}
        for name in names:
            found.append(_standing(dataset, name, mine, scenes))
    return found


@dataclass(frozen=True)
class _Scene:
    floor: Floor | None
    lines: list[Line]
    errors: Mapping[tuple[object, ...], dict[int, float]]  # by line, then record


def _scene(rows: Sequence[Row], scene: str) -> _Scene:
    mine: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if row.get("scene") == scene and row["kind"] in ("attack", "floor"):  # controls come with several units
            key = tuple(row.get(k) for k in ("kind", "guess", "defense", "tier", "server", "attack", "example"))
            mine.setdefault(key, row)
    kept = list(mine.values())
    errors = {
        key: {m.example: m.mse for m in some}
        for key, some in group(read(kept, "attack"), "weights", "defense", "tier", "server", "attack").items()
    }
    return _Scene(best_floor(kept), lines(kept), errors)


def _standing(dataset: str, name: str, rows: Sequence[Row], scenes: Mapping[str, _Scene]) -> Standing:
    mine = [row for row in rows if row.get("defense") == name]
    told = next((row for row in mine if row["kind"] == "client"), {})
    got = {scene: tuple(_got(line, found) for line in found.lines if line.defense == name)
           for scene, found in scenes.items()}  # fmt: skip
    account = Account(name, told["spent"]) if "spent" in told else None
    beaten = () if account is None else tuple(
        sentence for scene, found in scenes.items() for one in got[scene]
        for sentence in below(one, account, told["floor"], found.floor, found.errors[one.line.key])
    )  # fmt: skip
    return Standing(
        dataset=dataset,
        defense=name,
        costs=_costs(name, rows),
        untrained={row["split"]: row["why"] for row in mine if row["kind"] == "training" and "why" in row},
        got=got[ONE],
        planted=got[PLANTED],
        skipped={row["tier"]: row["why"] for row in mine if row["kind"] == "skip"},
        account=account,
        measured=_measured(told),
        floor=told.get("floor"),
        blind=scenes[ONE].floor,
        time=next((row["ratio"] for row in mine if row["kind"] == "time"), None),
        beaten=beaten,
        errors=tuple(told.get("errors", ())),
    )


def _measured(told: Row) -> Interval | None:
    if (share := told.get("measured")) is None:
        return None
    return Interval(share["mu_measured"], share["low"], share["high"], 1)


def _got(line: Line, scene: _Scene) -> Got:
    assert scene.floor is not None  # there is no line without one
    blind, errors = scene.floor, scene.errors[line.key]
    whole = fmean(errors.values()) / blind.mse.mean
    each = [whole + (mse - whole * blind.by_example[i]) / blind.mse.mean for i, mse in errors.items()]
    return Got(line, interval(each), min(mse / blind.by_example[i] for i, mse in errors.items()))


def below(got: Got, account: Account, floor: float, blind: Floor | None, errors: Mapping[int, float]) -> Iterable[str]:
    """Yield how an attack got below a certificate, beyond what chance explains: an error in one of the two."""
    line, share = got.line, got.line.identified
    assert blind is not None
    who = f"{line.tier}: {line.server} + {line.attack}"
    kappa = 1 / line.gallery if line.attack == INFORMED else max(1 / line.gallery, blind.identified.high)
    bound = account.guess(kappa)
    if share.count and chance_of(share.hits, share.count, bound) < SIGNIFICANT:
        yield f"{who} picks {share.as_count}, and no server more than {bound:.0%}"
    if line.attack == INFORMED:
        return  # the floor is for a server without a list
    beyond = interval([mse - floor * blind.by_example[i] for i, mse in errors.items()])
    if len(errors) > 1 and beyond.high < 0:
        yield f"{who} errs {got.error:.2f} of the blind guess, and for Gaussian images no server less than {floor:.2f}"


def _costs(name: str, rows: Sequence[Row]) -> dict[str, Price]:
    trained = [row for row in rows if row["kind"] == "training"]
    found: dict[str, Price] = {}
    for (split,), some in group(trained, "split").items():
        mine = settled([row for row in some if row["defense"] == name])
        if not mine:
            continue
        control = settled([row for row in some if row["defense"] == "none"])
        accuracy = {seed: row["accuracy"] for seed, row in mine.items()}
        lost = paired_loss({seed: row["accuracy"] for seed, row in control.items()}, accuracy)
        tried = [row["multiple"] for row in some if row["defense"] == name]
        one = next(iter(mine.values()))
        edge = one["multiple"] in (min(tried), max(tried))
        found[split] = Price(spread(accuracy.values()), None if lost is None else 100 * lost, one["lr"], edge)
    return found


def table(found: Sequence[Standing]) -> list[Row]:
    """Return the lines that a person reads."""
    splits = list(dict.fromkeys(split for one in found for split in (*one.costs, *one.untrained)))
    rows = []
    for one in found:
        row: Row = {"data": one.dataset, "defence": one.defense}
        for split in splits:
            row |= {
                f"accuracy, {split}": _accuracy(one, split),
                "points below": _points(one.costs.get(split)),
            }
            row[f"points below, {split}"] = row.pop("points below")
        rows.append(row | _strongest(one) | _promised(one) | {"step": "–" if one.time is None else f"{one.time:.1f} ×"})
    return rows


def short_table(found: Sequence[Standing]) -> list[Row]:
    """Return as much of it as a terminal shows: the accuracy on the first split, what is got, what is promised."""
    kept = {"points below, paper": "below", "error / blind guess": "error", "picked of 100": "picked", "μ": "μ"}
    return [
        {"data": row["data"], "defence": row["defence"], "accuracy": row.get("accuracy, paper", "not run")}
        | {name: row.get(key, "–") for key, name in kept.items()}
        for row in table(found)
    ]


def tier_table(found: Sequence[Standing]) -> list[Row]:
    """Return what the strongest server of each tier got."""
    attacked = [one for one in found if one.defense != BATCHES.name]
    return [{"data": one.dataset, "defence": one.defense} | {t: one.tier(t) for t in TIERS} for one in attacked]


def _accuracy(one: Standing, split: str) -> str:
    cost = one.costs.get(split)
    if cost is None:
        return "did not train" if split in one.untrained else "not run"
    spread_ = f" [{cost.accuracy.low:.3f}, {cost.accuracy.high:.3f}]" if cost.accuracy.count > 1 else ""
    return f"{cost.accuracy.mean:.3f}{spread_}"


def _points(cost: Price | None) -> str:
    return "–" if cost is None or cost.points is None else f"{cost.points:+.1f}"


def _strongest(one: Standing) -> Row:
    best, told, worst = one.strongest, one.identified, one.worst
    empty = "not attacked" if one.defense == BATCHES.name else "uninformative" if one.got else "not run"
    return {
        "error / blind guess": empty if best is None else f"{best.error:.2f}",
        "by": "–" if best is None else f"{best.line.tier}: {best.line.server}",
        "worst record": "–" if worst is None else f"{worst:.2f}",
        "picked of 100": empty if told is None else told.line.identified.as_count,
    }


def _promised(one: Standing) -> Row:
    if one.account is None or one.floor is None:
        return {"μ": "none" if one.got else "–", "ε": "–", "guess ≤": "–", FLOOR: "–"}
    a = one.account
    measured = "" if one.measured is None else f" (measured {a.mu * one.measured.mean:.2f})"
    said = {"μ": f"{a.mu:.2f}{measured}", "ε": f"{a.epsilon(DELTA):.1f}", "guess ≤": f"{a.guess(0.01):.0%}"}
    return said | {FLOOR: f"{one.floor:.2f}" + (" **beaten**" if one.beaten else "")}
