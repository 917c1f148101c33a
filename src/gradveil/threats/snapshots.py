"""The models that an audit looks at: what clients receive in the first round, and after training in the last."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gradveil import pace
from gradveil.auditing.run_folder import Row, RunFolder
from gradveil.countermeasures import Countermeasure
from gradveil.errors import GradveilError, from_defense, is_out_of_memory
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.threats.probes import Probed
from gradveil.threats.rows import OBLIVIOUS
from gradveil.threats.setup import AuditSetup, is_small, one_thread

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class Snapshot:
    """One federation's model in one round: what the attacked clients received."""

    round: str  # "first" or "last"
    round_number: int
    weights: str  # "start", or the defence it was trained under
    model: nn.Module
    planted: str = ""  # the attack of a malicious server that made this model
    clients: frozenset[tuple[str, int]] | None = None  # by defence and number, that get this model; None: all


def first_snapshot(scene: AuditSetup) -> Snapshot:
    """Return the model that clients receive in the first round."""
    return Snapshot("first", 1, "start", scene.model)


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
                with one_thread(is_small(scene.model)), limit, _memory_told(defense):
                    rows, sent = _train(scene, defense, rounds, partial(_tell, progress, done, total))
            except Exception as error:
                if (told := from_defense(error)) is error:
                    raise
                where = {"round": "last", "round_number": rounds, "weights": defense}
                tried = {"tier": "oblivious", "server": OBLIVIOUS, "attack": "training"}
                if not store.done(f"crash/{defense}"):
                    store.add(
                        f"crash/{defense}", [{"kind": "skip", "defense": defense, **tried, **where, "why": str(told)}]
                    )
                done += rounds
                continue
            store.add(unit, rows, sent)
        done += rounds
        if rounds > 1:
            restored = copy.deepcopy(scene.model)
            restored.load_state_dict({name: torch.from_numpy(value) for name, value in store.arrays(unit).items()})
            yield Snapshot("last", rounds, defense, restored)
    progress("training", done, total)


@contextmanager
def _memory_told(defense: str) -> Iterator[None]:
    """Within, memory that does not suffice is one line."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise GradveilError(
            f"A local step under {defense} does not fit into memory. Choose a smaller --batch-size, or --device cpu."
        ) from error


def _tell(progress: Progress, before: int, total: int, done: int) -> None:
    progress("training", before + done, total)


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
    rows: list[Row] = [{"kind": "probe", "defense": defense, **said}, *server_rows(defense, servers)]
    if patient and not found.drawn:
        why = "it sends the same in every round, so there is nothing to add up"
        rows.append({"kind": "skip", "defense": defense, "tier": "multi-round", "server": "multi-round", "attack": "newton",  # noqa: E501
                     "round": "first", "round_number": 1, "weights": "start", "why": why})  # fmt: skip
    return rows


def server_rows(defense: str, servers: Sequence[Countermeasure]) -> list[Row]:
    """Return what each server that knows a defence does about it, as rows."""
    return [{"kind": "defense", "defense": defense, "server": server.name, "why": server.why} for server in servers]
