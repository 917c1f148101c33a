"""An audit in so many minutes: every tier gets an answer before any gets a second.

The order is that of what is known beforehand: what reads an answer off, what goes through a list, what plants weights,
what searches, what learns (``Attack.kind``). First all of these on one client, the undefended update before the
defences; then the other clients; then the second attack of each kind. Nothing is tried out: the first piece of work
says what the next ones take. Where a search is stopped, it stays at its best point; who is compared with it takes as
many steps. Where a control fails, the defences wait: a failure there would prove nothing.
"""

import copy
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gradveil import pace
from gradveil.attacks.base import KINDS, Kind
from gradveil.attacks.base import build as build_attack
from gradveil.attacks.search.matching import sending_norms
from gradveil.auditing.run_folder import Row
from gradveil.auditing.work import (
    NOT_TRIED,
    AttackRunner,
    Spent,
    cut_short,
    last_snapshots,
    probe_defenses,
    rounds_trained,
    stand_ins,
)
from gradveil.pace import as_clock
from gradveil.registry import describe
from gradveil.threats.panel import CHUNK, Snapshot, Target, first_snapshot, kind_of, last_resort, oblivious, panel
from gradveil.threats.rows import SIGNIFICANT, group, lines
from gradveil.threats.setup import AuditSetup
from gradveil.threats.verdict import DIAGNOSTIC

FEWEST = 50  # steps that a search is shortened to
DEAR = 2.0  # a step of a search, in gradients of a client's step, before one was taken
FIRST_STEP = {"search": 20.0, "learned": 300.0}  # gradients that a first step takes, where that is not known
MORE = 1.5  # times the steps, at least, where a search is done again


@dataclass
class Pace:
    """What attacks take here."""

    scene: AuditSetup
    gradient: float  # seconds of the gradient of a client's local step
    each: dict[str, float] = field(default_factory=dict)  # seconds of an attack on one update, to its end
    a_step: dict[str, float] = field(default_factory=dict)  # seconds of a step, by attack as it was asked for
    short: dict[str, str] = field(default_factory=dict)  # attack -> what it was shortened to
    least: dict[str, float] = field(default_factory=dict)  # seconds of its first steps, of one that was stopped

    def fit(self, attack: str, seconds: float) -> bool:
        """Shorten a search to what one update can have in this time; return whether that is more than it had."""
        built: Any = self.scene.attacks.get(attack) or build_attack(attack)
        steps, before = getattr(built, "steps", 0), self._steps(self.short.get(attack, ""))
        known = self.knows(attack)
        if built.kind != "search" or steps < 2 * FEWEST or not hasattr(built, "spec_name"):
            return not known
        a_step = self.a_step.get(attack, DEAR * self.gradient * self.scene.config.planned.num_steps)
        wanted = steps if a_step * steps <= seconds else max(FEWEST, int(seconds / a_step) // 10 * 10)
        if known and (attack in self.each or wanted < MORE * before):
            return False
        if wanted < steps:
            self.short[attack] = describe(replace(built, steps=wanted))
        else:
            self.short.pop(attack, None)
        return True

    def _steps(self, spec: str) -> int:
        return getattr(build_attack(spec), "steps", 0) if spec else 0

    def knows(self, attack: str) -> bool:
        """Return whether an attack was begun, shortened or not."""
        return attack in self.short or attack in self.each

    def cost(self, attack: str, most: float) -> float:
        """Return the seconds of an attack on one update in so many steps at most; 0: not known."""
        a_step, each = self.a_step.get(self._asked(attack), math.inf), self.each.get(attack, 0.0)
        return min(each, a_step * most) if math.isfinite(most) else each

    def _asked(self, attack: str) -> str:
        return next((name for name, short in self.short.items() if short == attack), attack)

    def is_worth(self, attack: str, seconds: float) -> bool:
        """Return whether an attack may be begun: whether its first steps do not take longer than that."""
        known = FIRST_STEP.get(kind_of(self.scene, attack), 0.0) * self.gradient
        return self.least.get(attack, known) <= seconds

    def learn(self, attack: str, spent: Spent, count: int) -> None:
        """Note what a piece of so many updates took."""
        self.each[attack] = max(spent.whole / count, 1e-9)
        asked = self._asked(attack)
        if spent.late:
            self.least[attack] = spent.seconds / max(1, spent.steps)
        if spent.steps:
            self.a_step[asked] = spent.seconds / count / spent.steps

    def rows(self) -> Iterator[Row]:
        """Yield what the searches that were shortened, or stopped, would take in full."""
        for attack, seconds in self.a_step.items():
            built: Any = self.scene.attacks.get(attack) or build_attack(attack)
            steps = getattr(built, "steps", 0)
            if steps and built.kind == "search":
                yield {"kind": "cost", "attack": attack, "short": self.short.get(attack, attack), "steps": steps,
                       "seconds": seconds * steps}  # fmt: skip


Control = tuple[str, ...]


def control_of(target: Target) -> Control:
    """Return what names a target's control: round, weights and attack."""
    return target.look.round, target.look.weights, target.attack


def left_over(
    work: AttackRunner, paced: Pace, looks: Sequence[Snapshot], failed: Collection[Control], why_not_trained: str
) -> list[Row]:
    """Return a row for each attack that was not tried, and for what the searches would have taken."""
    rows: list[Row] = list(paced.rows())
    scene, reached = work.scene, {look.weights for look in looks if look.round == "last"}
    everybody = frozenset((d, v) for d in scene.defenses for v in scene.victims)
    planted = {look.planted: replace(look, clients=everybody) for look in looks if look.planted}
    wanted = panel(scene, [first_snapshot(scene), *planted.values(), *(stand_ins(scene) if scene.trains else [])])
    for target in (t for its in wanted.values() for t in its):
        short = replace(target, attack=paced.short.get(target.attack, target.attack))
        if not work.left([target]):
            continue
        trained = target.look.round == "first" or target.look.weights in reached
        more: Row = {}
        if not work.left([short]):
            why, out = f"shortened to {short.attack}: all its steps take too long", False
        elif trained and target.defense != "none" and control_of(short) in failed:
            why, out = "its control failed, so a failure would prove nothing, and no time was left", False
            more = {"control_failed": short.attack}
        else:
            why, out = "out of time" if trained else why_not_trained or "out of time in training", True
            why = f"{why}, stopped before it was done" if work.was_cut(short) else why
        rows.append(work.not_tried(target, why, out) | more)
    return rows


SHARE = 0.5  # of the time that is left after the first round, at most
TESTED = 1000  # examples that accuracy is measured on, at most
NOTE = "training"  # the unit that says what was left out of it


def trained_snapshots(work: AttackRunner, seconds: float) -> tuple[list[Snapshot], str]:
    """Train under each defence; return the models of the last round, or why there are none."""
    scene, store = work.scene, work.store
    names = [d for d in scene.defenses if not store.done(f"train/{d}")]
    rounds, share, why = rounds_trained(store) or scene.config.rounds, _before(store.rows), ""
    if names and share is None:
        a_round = work.round_cost(names[0]) * len(names)
        rounds, share = _fitting(scene, rounds, a_round, SHARE * seconds)
        if rounds < min(2, scene.config.rounds):
            return [], f"out of time: a round of training takes about {as_clock(a_round)}"
        store.add(store.new(NOTE), _said(scene, rounds, share))
    looks: list[Snapshot] = []
    with suppress(pace.OutOfTime):
        looks += last_snapshots(_sampled(scene, share or 1.0), store, work.progress, rounds, seconds)
    return looks, why


def _before(rows: tuple[Row, ...]) -> float | None:
    """Return the share of the records that a run trained on before."""
    return next((row["share"] for row in rows if row["kind"] == "share"), None)


def _least(scene: AuditSetup) -> float:
    """Return the share of the records that makes one batch of the largest client's."""
    most = max(map(len, scene.clients))
    return min(1.0, (scene.config.batch_size or most) / most)


def _fitting(scene: AuditSetup, rounds: int, a_round: float, seconds: float) -> tuple[int, float]:
    """Return how many rounds, on which share of the records, fit: fewer records go before fewer rounds."""
    if a_round <= 0:
        return rounds, 1.0
    share = max(_least(scene), min(1.0, seconds / (rounds * a_round)))
    return min(rounds, int(seconds / (share * a_round) + 1e-9)), share


def _sampled(scene: AuditSetup, share: float) -> AuditSetup:
    """Return the scene with a share of each client's records, and fewer examples to test on."""
    if share >= 1:
        return scene
    size = scene.config.batch_size or 1
    clients = [part[: max(min(size, len(part)), math.floor(share * len(part)))] for part in scene.clients]
    test = scene.dataset.test
    few = replace(test, images=test.images[:TESTED], labels=test.labels[:TESTED])
    return replace(scene, clients=clients, dataset=replace(scene.dataset, test=few))


def _said(scene: AuditSetup, rounds: int, share: float) -> list[Row]:
    wanted = scene.config.rounds
    parts = [f"for {rounds} of {wanted} rounds"] if rounds < wanted else []
    parts += [f"on {share:.0%} of each client's records"] if share < 1 else []
    said = f"Trained {' '.join(parts)}: more do not fit in the time."
    return [{"kind": "share", "share": share}, *([{"kind": "note", "says": said}] if parts else [])]


LOG = logging.getLogger("gradveil")
QUICK: tuple[Kind, ...] = ("closed form", "list")  # what needs no other weights, and no search
FIRST = 0.1  # of the time, at most, for the first pictures
PROBES = 0.15  # and for running the defences by themselves
METER = 0.1  # of the time, at most, for certificates and leak meter
FIRST_ROUND = 0.5  # of the time that is left, where there is training after it
SHARES: dict[Kind, float] = {"closed form": 0.25, "list": 0.3, "planted": 0.3, "search": 1.0, "learned": 1.0}
DEEPER = 0.6  # of the time after that, at most, for a search that failed without a defence
DIAGNOSED = 0.4  # of the time after that, at most, for the same in an easier setting
OTHERS = 0.2  # of the time after that, at most, to plan what malicious servers send the other clients
CONTROL = 0.3  # of an attack's time, at most, for what all else is compared with
PIECE = 30.0  # seconds of attacks between two writes, about
LITTLE = 3.0  # seconds with which nothing is begun that may take long


@dataclass
class Budget:
    """How far an audit in limited time is; the limit is the one it is run in (see ``pace``)."""

    work: AttackRunner
    waiting: list[Target] = field(default_factory=list)  # defended updates whose control failed
    looks: list[Snapshot] = field(default_factory=list)  # that were attacked
    why_not_trained: str = ""

    @property
    def scene(self) -> AuditSetup:
        """What is audited."""
        return self.work.scene

    @cached_property
    def first(self) -> Snapshot:
        """The first round's model."""
        return first_snapshot(self.scene)

    @cached_property
    def pace(self) -> Pace:
        """What attacks take, as far as that is known."""
        return Pace(self.scene, self.work.step_seconds())

    @property
    def meter_seconds(self) -> float:
        """What is kept for certificates and leak meter."""
        return min(self.scene.config.meter_seconds, METER * 60 * (self.scene.config.minutes or 0))

    def left(self) -> float:
        """Seconds that are left for training and attacks."""
        return pace.left() - self.meter_seconds

    def run(self) -> None:
        """Do what fits, and write down what did not."""
        store, scene = self.work.store, self.scene
        store.drop([NOT_TRIED, *(row["unit"] for row in store.rows if cut_short(row))])
        self.looks = [self.first]
        if self.left() > 0:
            self._say()
            self._at_once()
            probe_defenses(scene, store, PROBES * self.left())
            self._round([self.first], self._in(FIRST_ROUND if scene.trains else 1.0))
        if scene.trains and self.left() > 0:
            later, self.why_not_trained = trained_snapshots(self.work, self.left())
            self.looks += later
            self._round(later, self._end)
        if self.left() > LITTLE:
            resort = last_resort(scene, self.first, self.work.holding())
            self._by_kind([t for its in resort.values() for t in its], self._end)
        self._deeper(self._end)
        self._pieces(self.waiting, self._end)
        if rest := left_over(self.work, self.pace, self.looks, self._failed(), self.why_not_trained):
            store.add(NOT_TRIED, rest)

    def _at_once(self) -> None:
        """Attack the first client's undefended update by what reads it off, else by a search: the first picture."""
        mine = [Target(self.first, "none", oblivious(), attack, self.scene.victims[0]) for attack in self.scene.attacks]
        self._pieces([t for t in mine if kind_of(self.scene, t.attack) == "closed form"], self._in(FIRST))
        if not any(row["kind"] == "attack" for row in self.work.store.rows):
            searches = self._left([t for t in mine if kind_of(self.scene, t.attack) == "search"])
            self._controls(searches[:1], self._in(FIRST), 1.0)

    def _in(self, share: float) -> float:
        """Return when so much of the time that is left will be over."""
        return pace.clock() + share * self.left()

    def _say(self) -> None:
        config, scene = self.scene.config, self.scene
        LOG.info("plan: %s in all, %s left", as_clock(60 * (config.minutes or 0)), as_clock(self.left()))
        LOG.info("plan: every kind of attack on one client first: closed forms, lists, planted weights, searches")
        training = f"then training under {len(scene.defenses)} defences, and the last round"
        LOG.info("plan: %s", training if scene.trains else "the weights as they are; --rounds asks for training")

    @property
    def _end(self) -> float:
        return self._in(1.0)

    def _round(self, looks: Sequence[Snapshot], end: float) -> None:
        """Attack what was sent at these models, until so late: one client, searches that failed, all other clients."""
        first, others = list(self.scene.victims[:1]), list(self.scene.victims[1:])
        if not looks or end <= pace.clock():
            return
        self._by_kind(self._ranked(looks, first)[0] + self._more_lists(looks), end, QUICK)
        began = pace.clock()
        planted = self._planted(looks, first) if end > began else []
        took = pace.clock() - began
        now, later = self._ranked([*looks, *planted], first)
        self._by_kind(now, end, [kind for kind in KINDS if kind not in QUICK])
        while (refused := self.work.refused()) & {t.attack for t in now if t.defense == "none"}:  # the next of its kind
            now, later = self._ranked([*looks, *planted], first, refused)
            self._by_kind(now, end)
        self._deeper(pace.clock() + DEEPER * (end - pace.clock()))
        self._diagnose(pace.clock() + DIAGNOSED * (end - pace.clock()))
        if others and end > pace.clock():
            some = others[: int(OTHERS * (end - pace.clock()) / took)] if took else others
            now, more = self._ranked([*looks, *self._planted(looks, some)], others, self.work.refused())
            self._by_kind(now, end)
            later += more
        self._by_kind(later, end)

    @cached_property
    def _pickers(self) -> range:
        """The first clients: as many as must be picked out of a list rightly, so that chance does not explain it."""
        victims, choices = self.scene.victims, self.scene.public.choices
        return victims[: next((n for n in range(1, len(victims)) if choices**-n < SIGNIFICANT), len(victims))]

    def _more_lists(self, looks: Sequence[Snapshot]) -> list[Target]:
        its = self._ranked(looks, self._pickers[1:])[0]
        return [t for t in its if kind_of(self.scene, t.attack) == "list"]

    def _planted(self, looks: Sequence[Snapshot], victims: Sequence[int]) -> list[Snapshot]:
        made = self.work.plant(victims) if self.first in looks and victims else []
        self.looks += made
        return made

    def _ranked(
        self, looks: Sequence[Snapshot], victims: Sequence[int], refused: Collection[str] = ()
    ) -> tuple[list[Target], list[Target]]:
        """Return each tier's first search and planted weights on each defence, all that takes less, and their controls;
        and the rest."""
        mine = [t for its in panel(self.scene, looks).values() for t in its if t.victim in victims]
        mine = [t for t in mine if t.attack not in refused]
        groups: dict[tuple[object, ...], list[Target]] = {}
        for t in mine:
            key = (id(t.look), t.defense, t.server.tier, kind_of(self.scene, t.attack), t.victim)
            groups.setdefault(key, []).append(t)
        first = [t for key, its in groups.items() for t in (its[:1] if key[3] in ("planted", "search") else its)]
        needed = {control_of(t) for t in first}
        chosen = {id(t) for t in first} | {id(t) for t in mine if t.defense == "none" and control_of(t) in needed}
        return [t for t in mine if id(t) in chosen], [t for t in mine if id(t) not in chosen]

    def _by_kind(self, targets: Sequence[Target], end: float, kinds: Sequence[Kind] = KINDS) -> None:
        """Attack these until so late: what takes least first."""
        for kind in kinds:
            its = self._left([t for t in targets if kind_of(self.scene, t.attack) == kind])
            if kind in ("closed form", "planted"):  # what failed for one client does so for others
                hopeless = self._failed()
                self.waiting += [t for t in its if control_of(t) in hopeless]
                its = [t for t in its if control_of(t) not in hopeless]
            stop = pace.clock() + SHARES[kind] * (end - pace.clock())
            attacks = group(its, "attack")
            for number, mine in enumerate(attacks.values()):
                count = sum(len(rest) for rest in list(attacks.values())[number:])
                time = (stop - pace.clock()) * len(mine) / count
                if time > 0 and kind == "list":
                    self._pieces(mine, pace.clock() + time)
                elif time > 0:
                    self._compared(mine, pace.clock() + time)

    def _compared(self, its: Sequence[Target], end: float) -> None:
        """Attack with one attack: controls, and where these succeed the defences."""
        models: dict[tuple[str, ...], list[Target]] = {}
        for t in its:
            models.setdefault((t.look.round, t.look.weights, t.look.planted), []).append(t)
        for number, mine in enumerate(models.values()):
            count = sum(len(rest) for rest in list(models.values())[number:])
            stop = pace.clock() + (end - pace.clock()) * len(mine) / count
            cells = self._unanswered_first([t for t in mine if t.defense != "none"])
            self._controls([t for t in mine if t.defense == "none"], stop, 1 / (1 + len(cells)))
            failed, tried = self._failed(), self._tried()
            cells = [t for t in cells if control_of(self._short(t)) in tried]
            self.waiting += [t for t in cells if control_of(self._short(t)) in failed]
            self._pieces([t for t in cells if control_of(self._short(t)) not in failed], stop)

    def _unanswered_first(self, cells: Sequence[Target]) -> list[Target]:
        """Return targets in the order in which tiers of servers get an answer: one each, then a second."""
        rows = [row for row in self.work.store.rows if row["kind"] == "attack" and not cut_short(row)]
        count = Counter((row["round"], row["defense"], row.get("tier")) for row in rows)
        place: dict[int, int] = {}
        for t in cells:
            place[id(t)] = count[tier := (t.look.round, t.defense, t.server.tier)]
            count[tier] += 1
        return sorted(cells, key=lambda t: place[id(t)])

    def _controls(self, its: Sequence[Target], stop: float, fair: float) -> None:
        """Attack undefended updates: with as many steps as the defences can have, and where that fails with more."""
        spent = 0.0
        for again, share in enumerate((fair, CONTROL) if fair < CONTROL else (fair,)):
            time = share * (stop - pace.clock())
            if not its or time <= 0:
                return
            begin = FIRST_STEP.get(kind_of(self.scene, its[0].attack), 0.0) * self.pace.gradient
            time = max(time, min(1.1 * begin, (stop - pace.clock()) / 2))
            asked, failed = its[0].attack, {control_of(self._short(t)) for t in its} & self._failed()
            grown = self.pace.fit(asked, time / len(its)) if failed or not self.pace.knows(asked) else False
            if again and not (failed and (grown or time > 1.5 * spent)):
                return
            spent = time
            self._pieces(its, pace.clock() + max(time, min(LITTLE, stop - pace.clock())), at_least_one=True)

    def _deeper(self, end: float) -> None:
        """Go on with the first search that was shortened, or stopped, and failed without a defence."""
        search, time = self._failed_search(), min(end, self._end) - pace.clock()
        if search is None or time < LITTLE:
            return
        short = self._short(search)
        had = self.pace.cost(short.attack, self.work.stopped_at(short))
        if self.pace.fit(search.attack, 0.9 * time) or time > 2 * had:
            self._pieces([replace(search, defense="none", server=oblivious())], end, at_least_one=True)
        if control_of(self._short(search)) not in self._failed():
            self._pieces([t for t in self.waiting if t.attack == search.attack], end)

    def _diagnose(self, end: float) -> None:
        """Where a search fails, attack the first client with batch norm in evaluation mode: not what was configured."""
        config, model = self.scene.config, self.first.model
        search = self._failed_search()
        one = config.examples == config.planned.num_steps == 1
        if search is not None and one and sending_norms(model) and end - pace.clock() > LITTLE:
            look = replace(self.first, model=copy.deepcopy(model).eval(), weights=DIAGNOSTIC)
            self._pieces([replace(search, look=look, defense="none", server=oblivious())], end, at_least_one=True)

    def _failed_search(self) -> Target | None:
        failed = self._failed()
        waits = (t for t in self.waiting if control_of(self._short(t)) in failed and not t.look.planted)
        return next((t for t in waits if kind_of(self.scene, t.attack) == "search"), None)

    def _failed(self) -> set[tuple[str, ...]]:
        """Return the controls that failed, as round, weights and attack."""
        found = [x for x in lines(self.work.store.rows) if x.defense == "none"]
        return {(x.round, x.weights, x.attack) for x in found if x.void is not None}

    def _tried(self) -> set[Control]:
        """Return the controls that were attacked, or refused."""
        rows = [row for row in self.work.store.rows if row["kind"] in ("attack", "skip") and row["unit"] != NOT_TRIED]
        return {(row["round"], row["weights"], row["attack"]) for row in rows if row["defense"] == "none"}

    def _short(self, target: Target) -> Target:
        return replace(target, attack=self.pace.short.get(target.attack, target.attack))

    def _left(self, its: Sequence[Target]) -> list[Target]:
        """Return those that were not attacked yet, shortened or not."""
        shorts = [self._short(t) for t in its]
        full, short = (set(map(id, self.work.left(some))) for some in (its, shorts))
        return [t for t, other in zip(its, shorts, strict=True) if id(t) in full and id(other) in short]

    def _pieces(self, its: Sequence[Target], end: float = math.inf, at_least_one: bool = False) -> None:
        """Attack in pieces, each written down when it is done, as long as the next one fits."""
        left = self.work.left([self._short(t) for t in its])
        while left:
            time, most = min(end, self._end) - pace.clock(), self.work.stopped_at(left[0])
            cost = self.pace.cost(left[0].attack, most)
            if time <= 0:
                return
            if (cost > time and not at_least_one) or not self.pace.is_worth(left[0].attack, time):
                left = [t for t in left if t.attack != left[0].attack]
                continue
            part = [t for t in left if t.attack == left[0].attack and t.look.model is left[0].look.model]
            part = self._fitting(part, cost, time)
            self._piece(part, time, most)
            left, at_least_one = [t for t in left if t not in part], False

    def _fitting(self, its: Sequence[Target], cost: float, time: float) -> list[Target]:
        """Return how many to attack at once: one where that is not known, of a list the first clients'."""
        if kind_of(self.scene, its[0].attack) == "list" and not cost:
            return [t for t in its if t.victim in self._pickers] or list(its[:1])
        if its[0].attack not in self.pace.each:
            return list(its[:1])
        return list(its[: max(1, min(CHUNK, int(min(PIECE, time) / cost)) if cost else CHUNK)])

    def _piece(self, part: Sequence[Target], seconds: float, most: float) -> None:
        self.work.drop_cut(part)
        spent = self.work.attack(self.work.store.new(f"piece/{part[0].attack}"), part, seconds, most)
        if math.isinf(most):
            self.pace.learn(part[0].attack, spent, len(part))
