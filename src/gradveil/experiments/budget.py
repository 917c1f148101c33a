"""An audit in so many minutes: the cheapest informative work first, and a row for each thing that was not tried.

In this order: the undefended update in the first round, where pictures are there soonest; the defences in that round;
training, for as many rounds as fit; the last round. An attack that does not fit is shortened where it has steps to
spare, and its control says whether what is left of it still works. Where a control fails, the defences wait: a failure
there would prove nothing.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from gradveil import pace
from gradveil.experiments.looks import Look, first_look, last_looks, rounds_trained
from gradveil.experiments.panel import Target, last_resort, panel
from gradveil.experiments.rows import group, lines
from gradveil.experiments.run_folder import Row
from gradveil.experiments.scene import Scene
from gradveil.experiments.work import NOT_TRIED, Cost, Work, cut_short, stand_ins
from gradveil.pace import as_clock
from gradveil.registry import describe

LOG = logging.getLogger("gradveil")
METER = 0.1  # of the time, at most, for certificates and leak meter
SHARE = 0.35  # of the time, at most: for training, and as much for the attacks before it
PICTURE = 50.0  # seconds until the first picture
SLOW = 20.0  # seconds of one attack, beyond which another's speed is found out only when it is its turn
PIECE = 30.0  # seconds of attacks between two writes, about
FEWEST = 100  # steps that an attack is shortened to


@dataclass
class Budget:
    """The plan of an audit in limited time, and how far it came; the limit is the one it is run in (see ``pace``)."""

    work: Work
    costs: dict[str, Cost] = field(default_factory=dict)  # by attack
    short: dict[str, str] = field(default_factory=dict)  # attack -> what it was shortened to
    rounds: int = 0  # of training
    why_not_trained: str = ""
    unmeasured: set[str] = field(default_factory=set)  # attacks whose cost is another's so far
    waiting: list[Target] = field(default_factory=list)  # defended updates whose control failed
    planted: list[Look] = field(default_factory=list)  # what malicious servers would send
    units: int = 0

    @property
    def scene(self) -> Scene:
        """What is audited."""
        return self.work.scene

    @cached_property
    def first(self) -> Look:
        """The first round's model."""
        return first_look(self.scene)

    @property
    def meter_seconds(self) -> float:
        """What is kept for certificates and leak meter."""
        return min(self.scene.config.meter_seconds, METER * 60 * (self.scene.config.minutes or 0))

    def left(self) -> float:
        """Seconds that are left for training and attacks."""
        return pace.left() - self.meter_seconds

    def run(self) -> None:
        """Do what fits, and write down what did not."""
        store = self.work.store
        store.drop([NOT_TRIED, *(row["unit"] for row in store.rows if cut_short(row))])
        self.units = len({row["unit"] for row in store.rows})
        looks: list[Look] = []
        self.planted = self.work.plant()
        if self.left() > 0:
            self._attack(panel(self.scene, [self.first, *self.planted]), self._plan())
        if self.rounds:
            with suppress(pace.OutOfTime):
                looks += last_looks(self.scene, store, self.work.progress, self.rounds, self.left())
        if looks:
            self._attack(panel(self.scene, looks), self.left())
        if self.left() > SLOW:
            resort = last_resort(self.scene, self.first, self.work.holding())
            self._measure(resort)
            self._attack(resort, self.left())
        self._pieces(self.waiting)
        self._write_rest(looks)

    def _plan(self) -> float:
        """Measure one step of each kind of work, decide and say what fits; return the seconds for the first round."""
        scene, config = self.scene, self.scene.config
        all_now = panel(scene, [self.first, *self.planted])
        wanted = {a: its for a, all_ in all_now.items() if (its := self.work.left(all_))}
        later = panel(scene, stand_ins(scene))
        self._measure(later | wanted)
        total, known = self.left(), rounds_trained(self.work.store)
        self._shorten_all(wanted, total)
        if self.unmeasured:
            self._first_picture(self._shortened(next(iter(wanted.values()), [])))
        first, last = (sum(self.costs[a].of(len(its)) for a, its in some.items()) for some in (wanted, later))
        names = [d for d in scene.defenses if not self.work.store.done(f"train/{d}")]
        a_round = self._round_seconds(names, SHARE * total)
        rounds = known or config.rounds
        if first + rounds * a_round + last > total:
            rounds = known or min(rounds, int(SHARE * total / a_round) if a_round else rounds)
            if rounds * a_round > SHARE * total or (rounds < 2 <= config.rounds):
                rounds = 0
                self.why_not_trained = f"out of time: a round of training takes about {as_clock(a_round)}"
        self.rounds = rounds
        share = min(max(first, SHARE * total), total) if rounds else total
        self._shorten_all(wanted, share)
        self._say(wanted, later, a_round, first, last)
        return share

    def _measure(self, attacks: dict[str, list[Target]]) -> None:
        """Find out what the attacks take; where the first is slow, the others are put off until it is their turn."""
        for attack, its in attacks.items():
            self.costs[attack] = self.work.attack_cost(its)
            if self.costs[attack].of(1) > SLOW:
                self.unmeasured = {a for a in attacks if a not in self.costs}
                self.costs |= dict.fromkeys(self.unmeasured, self.costs[attack])  # as long as they are not known
                return

    def _shorten_all(self, wanted: dict[str, list[Target]], seconds: float) -> None:
        count = sum(map(len, wanted.values()))
        for attack, its in wanted.items():
            self._shorten(attack, its, seconds * len(its) / count)

    def _round_seconds(self, names: Sequence[str], enough: float) -> float:
        """Return what a round takes under all of these defences; a lower bound once it is too much in any case."""
        found = 0.0
        for done, name in enumerate(names, 1):
            one = self.work.round_cost(name)
            found += one
            if found + one * (len(names) - done) > enough:
                return found + one * (len(names) - done)
        return found

    def _shorten(self, attack: str, its: Sequence[Target], seconds: float) -> None:
        """Give an attack fewer steps where it cannot do one client's updates in this time."""
        built, cost = self.scene.attacks.get(attack), self.costs[attack]
        one = cost.of(len([t for t in its if t.victim == its[0].victim])) if its else 0.0
        steps = getattr(built, "steps", 0)
        if one <= seconds or steps <= FEWEST or not hasattr(built, "spec_name"):
            return
        fewer: Any = replace(built, steps=max(FEWEST, int(steps * seconds / one) // 10 * 10))  # type: ignore[type-var]
        self.short[attack] = describe(fewer)
        part = fewer.steps / steps
        self.costs[self.short[attack]] = Cost(cost.once * part, cost.each * part, round(cost.steps * part))

    def _say(
        self, first: dict[str, list[Target]], last: dict[str, list[Target]], a_round: float, early: float, late: float
    ) -> None:
        config = self.scene.config
        LOG.info("plan: %s in all, %s left", as_clock(60 * (config.minutes or 0)), as_clock(self.left()))
        for attack, its in first.items():
            cost, short = self.costs[attack], self.short.get(attack)
            if attack in self.unmeasured:
                LOG.info("plan: %s, %d attacks in the first round, if there is time", attack, len(its))
                continue
            said = f"{attack}, {len(its)} attacks in the first round: {as_clock(cost.of(len(its)))} at most"
            if cost.steps:
                said += f" ({cost.steps} steps of {cost.of(1) / cost.steps:.2g} s for one)"
            LOG.info("plan: %s%s", said, f"; shortened to {short}" if short else "")
        if self.rounds:
            LOG.info(
                "plan: training: %d of %d rounds under %d defences, %s each; then %d attacks in the last round",
                self.rounds, config.rounds, len(self.scene.defenses), as_clock(a_round), sum(map(len, last.values())),
            )  # fmt: skip
        else:
            LOG.info("plan: no training and no last round, %s", self.why_not_trained)
        whole, more = as_clock(early + config.rounds * a_round + late), "or more" if self.unmeasured else "at most"
        LOG.info("plan: all of it would take %s %s; what does not fit is not tried", whole, more)

    def _attack(self, wanted: dict[str, list[Target]], seconds: float) -> None:
        """Attack these for at most so many seconds, the quickest attack first."""
        end = pace.clock() + min(seconds, self.left())
        mine = {attack: self.work.left(self._shortened(its)) for attack, its in wanted.items()}
        order = sorted((its for its in mine.values() if its), key=lambda its: self._known_seconds(its[0].attack))
        for number, its in enumerate(order):
            attack, time = its[0].attack, end - pace.clock()
            if attack in self.unmeasured:
                if time < SLOW:
                    return
                self.unmeasured.remove(attack)
                self.costs[attack] = self.work.attack_cost(its, least=1)
            share = len(its) / sum(map(len, order[number:]))
            self._waves(its, pace.clock() + share * (end - pace.clock()))

    def _known_seconds(self, attack: str) -> float:
        return math.inf if attack in self.unmeasured else self.costs[attack].of(1)

    def _shortened(self, its: Sequence[Target]) -> list[Target]:
        return [replace(t, attack=self.short.get(t.attack, t.attack)) for t in its]

    def _seconds(self, its: Sequence[Target]) -> float:
        return sum(self.costs[attack].of(len(mine)) for (attack,), mine in group(its, "attack").items())

    def _waves(self, its: Sequence[Target], end: float) -> None:
        """Attack as many clients as fit, then more while there is time: their controls, then their defences."""
        clients = list(dict.fromkeys(t.victim for t in its))
        by_client = {c: [t for t in its if t.victim == c] for c in clients}
        started = False
        while clients and (time := end - pace.clock()) > 0:
            count = len(clients)
            while count > 1 and self._seconds([t for c in clients[:count] for t in by_client[c]]) > time:
                count -= 1
            if started and self._seconds(by_client[clients[0]]) > time:
                break
            wave = [t for c in clients[:count] for t in by_client[c]]
            controls = [t for t in wave if t.defense == "none"]
            self._first_picture(controls)
            self._pieces(controls, end, at_least_one=not started)
            failed = self._failed()
            cells = [t for t in wave if t.defense != "none"]
            self.waiting += [t for t in cells if _control(t) in failed]
            self._pieces([t for t in cells if _control(t) not in failed], end)
            clients, started = clients[count:], True

    def _failed(self) -> set[tuple[str, ...]]:
        """Return the controls that failed, as round, weights and attack."""
        found = [x for x in lines(self.work.store.rows) if x.defense == "none"]
        return {(x.round, x.weights, x.attack) for x in found if x.void is not None}

    def _first_picture(self, its: Sequence[Target]) -> None:
        """Attack one client for a moment if there is no picture yet and the whole would keep one waiting."""
        controls = [t for t in its if t.defense == "none"]
        gone = pace.seconds_of(self.scene.config.minutes) - pace.left()
        if controls and not any(row["kind"] == "attack" for row in self.work.store.rows):
            seconds = max(PICTURE / 4, PICTURE - gone)
            if self._seconds(controls) > seconds:
                self._piece(controls[:1], min(seconds, self.left()))

    def _pieces(self, its: Sequence[Target], end: float = math.inf, at_least_one: bool = False) -> None:
        """Attack in pieces, each written down when it is done, as long as the next one fits."""
        its = self.work.left(its)
        while its:
            end = min(end, pace.clock() + self.left())
            time, cost = end - pace.clock(), self.costs[its[0].attack]
            if time <= 0 or (cost.of(1) > time and not at_least_one):
                return
            part = [t for t in its if t.attack == its[0].attack][: cost.fits(min(PIECE, time))]
            self._piece(part, time)
            its, at_least_one = [t for t in its if t not in part], False

    def _piece(self, part: Sequence[Target], seconds: float) -> None:
        self.work.drop_cut(part)
        self.units += 1
        began, attack = pace.clock(), part[0].attack
        self.work.attack(f"piece/{attack}/{self.units}", part, seconds)
        cost, took = self.costs[attack], pace.clock() - began
        if (slower := took / max(cost.of(len(part)), 1e-9)) > 1:  # than thought
            self.costs[attack] = replace(cost, once=cost.once * slower, each=cost.each * slower)

    def _write_rest(self, looks: Sequence[Look]) -> None:
        """Write a row for each attack that was not tried, and what the servers do whose defence was not trained."""
        rows: list[Row] = []
        scene, reached = self.scene, {look.weights: look for look in looks}
        late = [reached.get(look.weights, look) for look in stand_ins(scene)]
        failed = self._failed()
        for target in (t for some in panel(scene, [self.first, *self.planted, *late]).values() for t in some):
            short = replace(target, attack=self.short.get(target.attack, target.attack))
            if not self.work.left([target]):
                continue
            trained = target.look.round == "first" or target.look.weights in reached
            if not self.work.left([short]):
                why, out = f"shortened to {short.attack}: all its steps take too long", False
            elif trained and target.defense != "none" and _control(short) in failed:
                why, out = "its control failed, so a failure would prove nothing, and no time was left", False
            else:
                why, out = "out of time" if trained else self.why_not_trained or "out of time in training", True
                why = f"{why}, stopped before it was done" if self.work.was_cut(short) else why
            rows.append(self.work.not_tried(target, why, out))
        if self.rounds and self.rounds < scene.config.rounds:
            says = f"Trained for {self.rounds} of {scene.config.rounds} rounds: more do not fit in the time."
            rows.append({"kind": "note", "says": says})
        if rows:
            self.work.store.add(NOT_TRIED, rows)


def _control(target: Target) -> tuple[str, ...]:
    return target.look.round, target.look.weights, target.attack
