"""The audit: train under each defence, attack what clients send, measure, judge."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradveil.attacks.base import Attack
from gradveil.countermeasures import Countermeasure
from gradveil.data.base import Dataset
from gradveil.defenses.base import Defense
from gradveil.errors import AttackError, UpdateError
from gradveil.experiments.certificates import certificate_rows
from gradveil.experiments.judge import Verdict, headline, verdicts
from gradveil.experiments.rows import NAIVE, Line, lines
from gradveil.experiments.run_folder import Row, RunFolder
from gradveil.experiments.scene import AuditConfig, Scene, build_scene, is_small, load_dataset, one_thread
from gradveil.experiments.trial import Trial, attack_rows, attempt, floors, naive, observe
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.models import build_working
from gradveil.registry import describe
from gradveil.tree import size
from gradveil.types import Observation

CHUNK = 96  # trials that run together
KEPT = 2**30  # bytes of updates that are kept for the next server; beyond that they are made again
Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Audit:
    """A finished audit: a run folder and what it says."""

    store: RunFolder

    @property
    def folder(self) -> Path:
        """Where the run is."""
        return self.store.path

    @property
    def rows(self) -> tuple[Row, ...]:
        """Every measured row."""
        return self.store.rows

    @property
    def lines(self) -> list[Line]:
        """The rows gathered over images: one attack by one server on one defence in one round."""
        return lines(self.rows)

    @property
    def verdicts(self) -> list[Verdict]:
        """What a server gets of each defence, in words."""
        return verdicts(self.rows)

    @property
    def headline(self) -> str:
        """One sentence over the whole audit."""
        return headline(self.rows)


def audit(
    *,
    model: str | nn.Module | Callable[..., nn.Module] | None = None,
    dataset: str | Dataset | Callable[..., Any] | None = None,
    defenses: Sequence[str | Defense] | None = None,
    attacks: Sequence[str | Attack] | None = None,
    config: AuditConfig | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Audit defences on a model and data set: ``audit(dataset="mnist", defenses=["pruning:share=0.9"])``.

    What is left out is as ``config`` has it, whose defaults are those of the command line. Model, data set, defences
    and attacks may be objects or functions in place of text. The run is written to ``out`` (default: a new folder
    under ``runs/``); with ``resume`` an earlier run in that folder is continued, and nothing is done twice.
    """
    base = config or AuditConfig()
    defended = {_text(d): d for d in (base.defenses if defenses is None else defenses)}
    attacked = {_text(a): a for a in (base.attacks if attacks is None else attacks)}
    source, network = dataset or base.dataset, model or base.model
    chosen = replace(
        base, dataset=_text(source), model=_text(network), defenses=tuple(defended), attacks=tuple(attacked)
    )
    data = load_dataset(source, chosen.data)
    built = build_working(network, data.input_shape, data.num_classes, chosen.seed)
    scene = build_scene(chosen, data, copy.deepcopy(built).train(), defended, attacked)
    with (
        RunFolder.start(out or default_folder(), chosen, resume, AuditConfig.FREE) as store,
        one_thread(is_small(built, data.input_shape)),
    ):
        run_audit(scene, store, progress or (lambda stage, done, total: None))
    return Audit(store)


def default_folder() -> Path:
    """Return a new place under ``runs/``."""
    return Path("runs") / f"audit-{datetime.now():%Y%m%d-%H%M%S}"


def run_audit(scene: Scene, store: RunFolder, progress: Progress) -> None:
    """Do what is not done yet."""
    if not store.done("truth"):
        rows, answers = floors(scene.truth, scene.public)
        store.add("truth", rows, {name: x.numpy() for name, x in {"truth": scene.truth.inputs, **answers}.items()})
    looks, observed = list(train_all(scene, store, progress)), Observed(scene)
    work = [
        (f"attack/{attack}/{i}", part)
        for attack, targets in panel(scene, looks).items()
        for i, part in enumerate(chunks(targets))
    ]
    total, done = sum(len(part) for _, part in work), 0
    for unit, part in work:
        progress("attacks", done, total)
        if not store.done(unit):
            trials = [observed.trial(target) for target in part]
            rows, images = attack_rows(trials, attempt(trials), scene.public)
            none = np.zeros((0, *scene.truth.inputs.shape[1:]), np.float32)
            store.add(unit, rows, {"found": np.stack(images) if images else none})
        done += len(part)
    progress("attacks", done, total)
    skipped = [row for row in store.rows if row["kind"] == "skip"]
    if skipped and not any(row["kind"] == "attack" for row in store.rows):
        raise AttackError(f"No attack could run: {skipped[0]['why']}")
    left = [defense for defense in scene.defenses if not store.done(f"promise/{defense}")]
    if left and scene.config.meter_seconds > 0:
        for defense, rows in certificate_rows(scene, left, progress).items():
            store.add(f"promise/{defense}", rows)


@dataclass(frozen=True)
class Look:
    """One federation's model in one round: what the attacked clients received."""

    round: str  # "first" or "last"
    round_number: int
    weights: str  # "start", or the defence it was trained under
    model: nn.Module


def train_all(scene: Scene, store: RunFolder, progress: Progress) -> Iterator[Look]:
    """Train under each defence; yield the models that clients receive in the first and in the last round."""
    yield Look("first", 1, "start", scene.model)
    rounds, done = scene.config.rounds, 0
    total = rounds * len(scene.defenses)
    for defense in scene.defenses:
        unit = f"train/{defense}"
        progress("training", done, total)
        if not store.done(unit):
            with one_thread(is_small(scene.model)):
                rows, sent = _train(scene, defense, partial(_tell, progress, done, total))
            store.add(unit, [*server_rows(defense, scene.countermeasures(defense, scene.model)), *rows], sent)
        done += rounds
        if rounds > 1:
            restored = copy.deepcopy(scene.model)
            restored.load_state_dict({name: torch.from_numpy(value) for name, value in store.arrays(unit).items()})
            yield Look("last", rounds, defense, restored)
    progress("training", done, total)


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress("training", before + done, total)


def _train(scene: Scene, defense: str, tell: Callable[[int], None]) -> tuple[list[Row], dict[str, Any]]:
    """Return the accuracy after every round, and the weights that were sent in the last one."""
    rows: list[Row] = []
    sent = _state(scene.model)
    training, chosen = scene.config, scene.defenses[defense]
    for round_ in simulate(scene.model, scene.dataset, scene.clients, training, chosen, scene.seeds):
        score = evaluate(round_.model, scene.dataset.test)
        head = {"kind": "accuracy", "defense": defense, "round": round_.number}
        rows.append(head | {"accuracy": score.accuracy, "loss": score.loss, "rejected": round_.rejected})
        if round_.number == training.rounds - 1:
            sent = _state(round_.model)
        tell(round_.number)
    return rows, sent


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def server_rows(defense: str, servers: Sequence[Countermeasure]) -> list[Row]:
    """Return what each server that knows a defence does about it, as rows."""
    return [{"kind": "defense", "defense": defense, "server": server.name, "why": server.why} for server in servers]


@dataclass(frozen=True)
class Target:
    """One update to reconstruct, by one server with one attack."""

    look: Look
    defense: str
    server: Countermeasure
    attack: str
    victim: int  # which attacked client


def panel(scene: Scene, looks: Sequence[Look]) -> dict[str, list[Target]]:
    """Return who attacks what, by attack: for each look the control, then each defence, naive and adaptive.

    In the first round all defences start from the same weights and share one control; later each federation
    has weights of its own, and its own control at those weights.
    """
    targets: dict[str, list[Target]] = {}
    for look in looks:
        tried = [d for d in scene.defenses if d != "none" and look.weights in ("start", d)]
        wanted: dict[tuple[str, str, str], Countermeasure] = {("none", NAIVE, a): naive() for a in scene.attacks}
        for defense in tried:
            wanted |= {(defense, NAIVE, a): naive() for a in scene.attacks}
            for server in scene.countermeasures(defense, look.model):
                used = [_own_name(scene, server.attack)] if server.attack else list(scene.attacks)
                wanted |= {("none", NAIVE, a): naive() for a in used}  # an attack is nothing without its control
                wanted |= {(defense, server.name, a): server for a in used}
        for (defense, _, attack), server in wanted.items():
            mine = [Target(look, defense, server, attack, victim) for victim in scene.victims]
            targets.setdefault(attack, []).extend(mine)
    return targets


def _own_name(scene: Scene, attack: str) -> str:
    """Return the panel's own settings of an attack that a countermeasure names without any."""
    return next((spec for spec in scene.attacks if spec.partition(":")[0] == attack), attack)


def chunks(targets: Sequence[Target]) -> list[Sequence[Target]]:
    """Cut targets into parts of nearly equal size that run together; a part is the unit of work."""
    count = -(-len(targets) // CHUNK)
    edges = [round(i * len(targets) / count) for i in range(count + 1)]
    return [targets[a:b] for a, b in pairwise(edges)]


@dataclass
class Observed:
    """What the attacked clients sent: each update is made once, however many servers and attacks look at it."""

    scene: Scene
    _kept: dict[tuple[str, str, str, int], Observation | UpdateError] = field(default_factory=dict)
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._num_classes = self.scene.dataset.num_classes

    def trial(self, target: Target) -> Trial:
        """Return the trial of a target."""
        scene, look, victim = self.scene, target.look, target.victim
        about = {
            "round": look.round,
            "round_number": look.round_number,
            "weights": look.weights,
            "defense": target.defense,
            "server": target.server.name,
            "attack": target.attack,
        }
        rng = scene.seeds("attack", target.attack, look.round, victim)
        attack = scene.attacks.get(target.attack, target.attack)
        first = victim * scene.config.examples
        return Trial(self.seen(target), target.server, attack, rng, scene.held_by(victim), about, first)

    def seen(self, target: Target) -> Observation | UpdateError:
        """Return what arrived from the client after one local step, or why nothing did."""
        key = (target.look.round, target.look.weights, target.defense, target.victim)
        if key in self._kept:
            return self._kept[key]
        seen = self._observe(target)
        self._bytes += 0 if isinstance(seen, UpdateError) else 4 * size(seen.update.gradient)
        if self._bytes <= KEPT:
            self._kept[key] = seen
        return seen

    def _observe(self, target: Target) -> Observation | UpdateError:
        scene, look, defense = self.scene, target.look, self.scene.defenses[target.defense]
        rng = scene.seeds("defense", target.defense, look.round, target.victim)
        batch, prior = scene.held_by(target.victim).to(scene.device), scene.public.prior
        try:
            return observe(look.model, batch, defense, rng, self._num_classes, prior, scene.config.lr)
        except UpdateError as error:
            return error


def _text(value: Any) -> str:
    """Return the spec of a method, or a name for a user's own object."""
    if isinstance(value, str):
        return value
    if isinstance(value, (Attack, Defense)):
        return describe(value) if hasattr(value, "spec_name") else repr(value)
    if isinstance(value, Dataset):
        return value.name
    return f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', type(value).__name__)}"
