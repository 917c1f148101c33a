"""The work of an audit, piece by piece: probe, train, attack, film. What is done is written down."""

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradveil import pace
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.countermeasures import Countermeasure
from gradveil.errors import GradveilError, from_defense, is_out_of_memory
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.modalities import IMAGE
from gradveil.threats.panel import ClientUpdates, Snapshot, Target, first_snapshot, oblivious, panel, plant
from gradveil.threats.probes import Probed
from gradveil.threats.rows import lines, tier_of
from gradveil.threats.setup import AuditSetup, is_small, one_thread
from gradveil.threats.trial import attempt, run
from gradveil.threats.verdict import by_tier, verdicts

LOG = logging.getLogger("gradveil")
TRY = 0.3  # seconds in which the speed of training is found out
TEST = 100  # examples that the speed of a test is found out with
NOT_TRIED = "not tried"  # the unit of what was left out

Progress = Callable[[str, int, int], None]  # stage, done, total
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

    @cached_property
    def observed(self) -> ClientUpdates:
        """What the attacked clients sent."""
        return ClientUpdates(self.scene)

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
        return any(cut_short(row) and self._key(row) == self._key_of(target) for row in self.store.rows)

    def stopped_at(self, target: Target) -> float:
        """Return after how many steps the control of a defended target was stopped; infinity: it was not."""
        control = target.about | {"defense": "none"}
        alike = ("round", "weights", "defense", "attack")
        stopped = [row for row in self.store.rows if row["kind"] == "attack" and "stopped_at" in row]
        found = [row["stopped_at"] for row in stopped if all(row[name] == control[name] for name in alike)]
        return max(found, default=math.inf) if target.defense != "none" else math.inf

    def refused(self) -> set[str]:
        """Return the attacks that cannot be run on undefended updates."""
        skipped = (row for row in self.store.rows if row["kind"] == "skip" and row["unit"] != NOT_TRIED)
        return {row["attack"] for row in skipped if row["defense"] == "none" and not row.get("out_of_time")}

    def drop_cut(self, targets: Sequence[Target]) -> None:
        """Remove what attacks on these had no time for: they are to be done again."""
        keys = set(map(self._key_of, targets))
        self.store.drop({row["unit"] for row in self.store.rows if cut_short(row) and self._key(row) in keys})

    def left(self, targets: Iterable[Target]) -> list[Target]:
        """Return the targets that were not attacked yet."""
        done = self.tried()
        return [t for t in targets if not {self._key_of(t), self._key(t.about)} & done]

    def not_tried(self, target: Target, why: str, out_of_time: bool = True) -> Row:
        """Return the row that says so."""
        first = target.victim * self.scene.config.examples
        return {"kind": "skip", **target.about, "example": first, "why": why, "out_of_time": out_of_time}

    def _key(self, row: Row) -> tuple[object, ...]:
        """Return what tells the update and the attack of a row apart; a row of no example is of all clients."""
        cell = tuple(row[name] for name in ("round", "weights", "defense", "server", "attack"))
        cell = (*cell, row.get("tier") or tier_of(row["server"]))
        return (*cell, row["example"] // self.scene.config.examples if "example" in row else None)

    def _key_of(self, target: Target) -> tuple[object, ...]:
        return (*self._key(target.about)[:-1], target.victim)

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


def stand_ins(scene: AuditSetup) -> list[Snapshot]:
    """Return the last round's looks, to count with: their weights are not there yet."""
    first, config = first_snapshot(scene), scene.config
    if config.rounds < 2 or not scene.trains:
        return []
    return [replace(first, round="last", round_number=config.rounds, weights=d) for d in scene.defenses]


def probe_defenses(scene: AuditSetup, store: RunFolder, seconds: float = math.inf) -> None:
    """Run each defence by itself, the last of them not begun where it would not end in so many seconds.

    What was not run is not assessed.
    """
    end, longest = pace.clock() + seconds, 0.0
    for defense in scene.defenses:
        if defense != "none" and not store.done(f"probe/{defense}"):
            began = pace.clock()
            if began + longest > end:
                scene.probes[defense] = Probed(notes=("It was not run by itself: there was no time.",), assessed=False)
            servers = scene.countermeasures(defense, scene.model)
            rows = probe_rows(defense, scene.probed(defense), servers, "multi-round" in scene.tiers)
            store.add(f"probe/{defense}", rows)
            longest = max(longest, pace.clock() - began)


def rounds_trained(store: RunFolder) -> int:
    """Return how many rounds a run trained for, 0 where it did not yet: the same under each defence."""
    return max((row["round"] for row in store.rows if row["kind"] == "accuracy"), default=0)


def last_snapshots(
    scene: AuditSetup, store: RunFolder, progress: Progress, rounds: int | None = None, seconds: float = math.inf
) -> Iterator[Snapshot]:
    """Train under each defence; yield the models that clients receive in the last round.

    For so many rounds, default: as the settings have it; where a part of the run was trained before, for as many as
    that was. Raise ``OutOfTime`` where one training does not end within these seconds.
    """
    rounds, done = rounds_trained(store) or rounds or scene.config.rounds, 0
    total = rounds * len(scene.defenses)
    for defense in scene.defenses:
        unit = f"train/{defense}"
        progress("training", done, total)
        if not store.done(unit):
            limit = pace.Limit(seconds, partial(progress, "local steps"), strict=True)
            try:
                with one_thread(is_small(scene.model)), limit:
                    tell = partial(lambda before, now: progress("training", before + now, total), done)
                    rows, sent = _train(scene, defense, rounds, tell)
            except Exception as error:
                if is_out_of_memory(error):
                    why = f"A local step under {defense} does not fit into memory."
                    raise GradveilError(f"{why} Choose a smaller --batch-size, or --device cpu.") from error
                if (told := from_defense(error)) is error:
                    raise
                if not store.done(f"crash/{defense}"):
                    look = Snapshot("last", rounds, defense, scene.model, 0.0)
                    about = Target(look, defense, oblivious(), "training", 0).about
                    store.add(f"crash/{defense}", [{"kind": "skip", **about, "why": str(told)}])
                done += rounds
                continue
            store.add(unit, rows, sent)
        done += rounds
        if rounds > 1:
            restored = copy.deepcopy(scene.model)
            restored.load_state_dict({name: torch.from_numpy(value) for name, value in store.arrays(unit).items()})
            yield Snapshot("last", rounds, defense, restored, scene.config.lr_of(rounds))
    progress("training", done, total)


def _train(
    scene: AuditSetup, defense: str, rounds: int, tell: Callable[[int], None]
) -> tuple[list[Row], dict[str, Any]]:
    """Return the accuracy after every round, and the weights that were sent in the last one."""
    rows: list[Row] = []
    sent = _state(scene.model)
    training, chosen = replace(scene.config, rounds=rounds), scene.defenses[defense]
    for round_ in simulate(scene.model, scene.dataset, scene.clients, training, chosen, scene.seeds):
        score = evaluate(round_.model, scene.dataset.test, loss=training.loss)
        head = {"kind": "accuracy", "defense": defense, "round": round_.number}
        if score.scored_by != "accuracy":
            head["scored_by"] = score.scored_by
        rows.append(head | {"accuracy": score.accuracy, "loss": score.loss, "rejected": round_.rejected})
        if round_.number == rounds - 1:
            sent = _state(round_.model)
        tell(round_.number)
    return rows, sent


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def probe_rows(defense: str, found: Probed, servers: Sequence[Countermeasure], patient: bool = False) -> list[Row]:
    """Return what running a defence says about it, and what servers that know it do, as rows."""
    said = {"errors": list(found.errors), "notes": list(found.notes), "assessed": found.assessed}
    rows: list[Row] = [{"kind": "probe", "defense": defense, **said}]
    rows += [{"kind": "defense", "defense": defense, "server": server.name, "why": server.why} for server in servers]
    if patient and not found.drawn:
        why = "it sends the same in every round, so there is nothing to add up"
        where = {"attack": "newton", "round": "first", "round_number": 1, "weights": "start"}
        who = {"defense": defense, "tier": "multi-round", "server": "multi-round"}
        rows.append({"kind": "skip", **who, **where, "why": why})
    return rows


FILM = "film"  # the unit
FRAMES = 9  # of a film, the attack's answer the last of them
SLOWER = 1.3  # between two frames that are kept, the number of steps grows by this
FILM_SECONDS = 10.0  # for one film, at most; one that takes longer is left out
FILM_SHARE = 0.05  # of the time that is left, likewise


@dataclass
class Watcher:
    """Keeps where a loop stands after steps that lie further and further apart."""

    steps: list[int] = field(default_factory=list)
    points: list[Tensor] = field(default_factory=list)
    _count: int = 0

    def __call__(self, point: Tensor) -> None:
        """Look at where the loop stands after one more step."""
        self._count += 1
        if not self.steps or self._count >= math.ceil(SLOWER * self.steps[-1]):
            self.steps.append(self._count)
            self.points.append(point.detach().cpu().clone())


def film(work: AttackRunner) -> None:
    """Write the films of a run, once; of images alone, since others do not come into view little by little.

    Each is of an attack on one client's update that is run once more alone, with the same random numbers, and watched:
    without a defence, and under the first defence that was asked for. Verdicts rest on the attacks themselves.
    """
    scene, store = work.scene, work.store
    if store.done(FILM) or scene.dataset.modality != IMAGE:
        return
    rows: list[Row] = []
    arrays = {}
    for target in _wanted(work):
        found = _film(work, target)
        if found is not None:
            row, frames = found
            arrays[str(len(rows))] = frames
            rows.append(row)
    store.add(FILM, rows or [{"kind": "film", "steps": []}], arrays)  # none: not to be tried again


def _wanted(work: AttackRunner) -> list[Target]:
    """Return what to show: the strongest attack of the first round without a defence, and of both servers with one.

    Of the audit's own attacks: those that a countermeasure brings along read an answer off, or learn one, at a stroke.
    """
    scene, first = work.scene, first_snapshot(work.scene)
    here = [x for x in lines(work.store.rows) if x.round == first.round and x.attack in scene.attacks]
    defended = next((name for name in scene.defenses if name != "none"), None)
    best = [by_tier(here, "none")["oblivious"]]
    best += [by_tier(here, defended)[tier] for tier in ("oblivious", "adaptive")] if defended else []
    targets = [t for its in panel(scene, [first]).values() for t in its if t.victim == scene.victims[0]]
    keys = dict.fromkeys(_shown(vars(line)) for line in best if line is not None)
    return [t for key in keys for t in targets if _shown(t.about) == key]


def _shown(about: Row) -> tuple[str, ...]:
    return about["defense"], about["tier"], about["server"], about["attack"]


def _film(work: AttackRunner, target: Target) -> tuple[Row, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] | None:
    """Return the row and the frames (F, *shape) of one attack; nothing where it takes no steps or too long."""
    trial, watcher = work.observed.trial(target), Watcher()
    with pace.Limit(min(FILM_SECONDS, FILM_SHARE * pace.left()), watch=watcher):
        result = attempt([trial])[0]
    if isinstance(result, GradveilError) or "out_of_time" in result.details or not watcher.steps or trial.truth is None:
        return None
    picks = np.unique(np.linspace(0, len(watcher.steps) - 1, FRAMES - 1).round().astype(int))
    shape = tuple(result.inputs.shape)
    if watcher.points[0].numel() < math.prod(shape):  # one example after the other
        return None
    seen = [watcher.points[i][: math.prod(shape)].reshape(shape) for i in picks]
    kind, bounds = trial.view.modality, trial.view.bounds
    steps = [kind.unit(x, bounds) for x in (*seen, result.inputs)]
    truth = kind.unit(trial.truth.inputs, bounds)
    mine = int(kind.order(steps[-1], truth)[0])  # an update does not keep the order of its examples
    frames = torch.stack([x[mine] for x in steps])
    errors = kind.metrics[kind.error].function(frames, truth[:1].expand_as(frames)).tolist()
    numbers = [*(watcher.steps[i] for i in picks), watcher.steps[-1]]
    row = {"kind": "film", **trial.about, "example": trial.first, "steps": numbers, "errors": errors}
    return row, frames.numpy().astype(np.float32)
