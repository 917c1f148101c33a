"""The work of an audit, piece by piece: what is done is written down; what a piece takes is measured beforehand."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from gradveil import pace
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.errors import GradveilError
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.threats.panel import ClientUpdates, Target, plant
from gradveil.threats.rows import tier_of
from gradveil.threats.servers import oblivious
from gradveil.threats.setup import AuditSetup, is_small, one_thread
from gradveil.threats.snapshots import Progress, Snapshot, first_snapshot
from gradveil.threats.trial import run
from gradveil.threats.verdict import verdicts

LOG = logging.getLogger("gradveil")
TRY = 0.3  # seconds in which the speed of training is found out
TEST = 100  # examples that the speed of a test is found out with
NOT_TRIED = "not tried"  # the unit of what was left out

Written = Callable[[RunFolder], None]  # called when a piece of work was written


@dataclass(frozen=True)
class Spent:
    """What a piece of work took."""

    seconds: float
    whole: float  # seconds that it would have taken to its end
    steps: int  # of the last search in it that were taken
    late: bool  # some of it was stopped before it was done


@dataclass(frozen=True)
class AttackRunner:
    """The attacks of an audit, and how long they and the training take."""

    scene: AuditSetup
    store: RunFolder
    progress: Progress
    written: Written
    observed: ClientUpdates = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "observed", ClientUpdates(self.scene))

    def attack(self, unit: str, part: Sequence[Target], seconds: float = math.inf, most: float = math.inf) -> Spent:
        """Attack these targets, all with one attack, in at most so many seconds and steps; write down what came of it.

        An attack that was stopped says after how many steps.
        """
        began = pace.clock()
        trials = [self.observed.trial(target) for target in part]
        with pace.Limit(seconds, steps_told(self.progress, part[0].attack), most=most) as limit:
            rows, images = run(trials, self.scene.public)
        for row in (late := [row for row in rows if _was_stopped(row)]):
            row["stopped_at"] = limit.done
        none = np.zeros((0, *self.scene.truth.inputs.shape[1:]), np.float32)
        self.store.add(unit, rows, {"found": np.stack(images) if images else none})
        self.written(self.store)
        took = pace.clock() - began
        return Spent(took, max(took, limit.whole), limit.done, bool(late))

    def tried(self) -> set[tuple[object, ...]]:
        """Return the keys of the targets that were attacked, to the attack's own end."""
        return {self._key(row) for row in self.store.rows if row["kind"] in ("attack", "skip") and not cut_short(row)}

    def was_cut(self, target: Target) -> bool:
        """Return whether an attack was stopped before it was done."""
        return any(cut_short(row) and self._key(row) == (*_cell(target), target.victim) for row in self.store.rows)

    def stopped_at(self, target: Target) -> float:
        """Return after how many steps the control of a defended target was stopped; infinity: it was not."""
        look = target.look
        control = (look.round, look.weights, "none", target.attack)
        cells = [row for row in self.store.rows if row["kind"] == "attack" and "stopped_at" in row]
        found = [r["stopped_at"] for r in cells if (r["round"], r["weights"], r["defense"], r["attack"]) == control]
        return max(found, default=math.inf) if target.defense != "none" else math.inf

    def refused(self) -> set[str]:
        """Return the attacks that cannot be run on undefended updates."""
        skipped = (row for row in self.store.rows if row["kind"] == "skip" and row["unit"] != NOT_TRIED)
        return {row["attack"] for row in skipped if row["defense"] == "none" and not row.get("out_of_time")}

    def drop_cut(self, targets: Sequence[Target]) -> None:
        """Remove what attacks on these had no time for: they are to be done again."""
        keys = {(*_cell(t), t.victim) for t in targets}
        self.store.drop({row["unit"] for row in self.store.rows if cut_short(row) and self._key(row) in keys})

    def left(self, targets: Iterable[Target]) -> list[Target]:
        """Return the targets that were not attacked yet."""
        done = self.tried()
        return [t for t in targets if not {(*_cell(t), t.victim), (*_cell(t), None)} & done]

    def not_tried(self, target: Target, why: str, out_of_time: bool = True) -> Row:
        """Return the row that says so."""
        about = self.observed.about(target)
        return {"kind": "skip", **about, "example": self._first(target), "why": why, "out_of_time": out_of_time}

    def _first(self, target: Target) -> int:
        return target.victim * self.scene.config.examples

    def _key(self, row: Row) -> tuple[object, ...]:
        cell = tuple(row[name] for name in ("round", "weights", "defense", "server", "attack"))
        cell = (*cell, row.get("tier") or tier_of(row["server"]))
        return (*cell, row["example"] // self.scene.config.examples if "example" in row else None)

    def plant(self, victims: Sequence[int]) -> list[Snapshot]:
        """Return what malicious servers would send to clients in the first round; why others cannot is written down."""
        planted, refused = plant(self.observed, first_snapshot(self.scene), victims)
        said = {self._key(row) for row in self.store.rows if row["kind"] == "skip"}
        if fresh := [row for row in refused if self._key(row) not in said]:
            self.store.add(self.store.new("planted"), fresh)
        return planted

    def holding(self) -> list[str]:
        """Return the defences of which no server that knows them got images so far."""
        got = {v.defense for v in verdicts(self.store.rows) if v.outcome in ("recovered", "recognised")}
        return [defense for defense in self.scene.defenses if defense not in got and defense != "none"]

    def step_seconds(self) -> float:
        """Return how many seconds the gradient of one local step takes, found out on the first client's update."""
        target = Target(first_snapshot(self.scene), "none", oblivious(), "", self.scene.victims[0])
        self.observed.seen(target)  # kept: it is attacked first
        batch, rng = self.scene.held_by(target.victim).to(self.scene.device), self.scene.seeds("step")
        began = pace.clock()
        with suppress(GradveilError):
            self.observed.send(target, batch, rng)
        return (pace.clock() - began) / max(1, self.scene.config.planned.num_steps)

    def round_cost(self, defense: str) -> float:
        """Return how many seconds a round of training under a defence takes, the test after it included."""
        scene, config = self.scene, self.scene.config
        size = min(config.batch_size or math.inf, *(len(part) for part in scene.clients))
        steps = config.epochs * sum(-(-len(part) // size) for part in scene.clients) / len(scene.clients)
        with one_thread(is_small(scene.model)):
            one = self._seconds_of_training(defense, 1, int(size))
            few = max(1, min(10, int(TRY / one), int(min(map(len, scene.clients)) // size)))
            each = self._seconds_of_training(defense, few, int(size)) / few
            began = pace.clock()
            test = scene.dataset.test
            evaluate(scene.model, replace(test, images=test.images[:TEST], labels=test.labels[:TEST]), loss=config.loss)
            tested = (pace.clock() - began) * len(test) / min(TEST, len(test))
        return config.clients * steps * each + tested

    def _seconds_of_training(self, defense: str, steps: int, size: int) -> float:
        scene = self.scene
        brief = replace(scene.config, rounds=1, clients=1, epochs=1)
        began = pace.clock()
        clients = [scene.clients[0][: steps * size]]
        list(simulate(scene.model, scene.dataset, clients, brief, scene.defenses[defense], scene.seeds))
        return pace.clock() - began


def steps_told(progress: Progress, attack: str) -> pace.Tell:
    """Return who hears how many steps of an attack are done."""
    return partial(progress, f"{attack.partition(':')[0]} steps")


def cut_short(row: Row) -> bool:
    """Return whether a row is of an attack that was stopped before it was done, or not tried: it may be tried again."""
    return row["unit"] == NOT_TRIED or _was_stopped(row)


def _was_stopped(row: Row) -> bool:
    return "out_of_time" in (row.get("details") or {})


def _cell(target: Target) -> tuple[object, ...]:
    look = target.look
    return look.round, look.weights, target.defense, target.server.name, target.attack, target.server.tier


def stand_ins(scene: AuditSetup) -> list[Snapshot]:
    """Return the last round's looks, to count with: their weights are not there yet."""
    first, config = first_snapshot(scene), scene.config
    if config.rounds < 2 or not scene.trains:
        return []
    return [replace(first, round="last", round_number=config.rounds, weights=d) for d in scene.defenses]
