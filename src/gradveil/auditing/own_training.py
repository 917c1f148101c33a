"""Training in limited time: for the rounds that were asked for, on as many records as fit into a share of it."""

import math
from contextlib import suppress
from dataclasses import replace

from gradveil import pace
from gradveil.auditing.run_folder import Row
from gradveil.auditing.work import Work
from gradveil.pace import as_clock
from gradveil.threats.looks import Look, last_looks, rounds_trained
from gradveil.threats.setup import Scene

SHARE = 0.5  # of the time that is left after the first round, at most
TESTED = 1000  # examples that accuracy is measured on, at most
NOTE = "training"  # the unit that says what was left out of it


def trained_looks(work: Work, seconds: float) -> tuple[list[Look], str]:
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
    looks: list[Look] = []
    with suppress(pace.OutOfTime):
        looks += last_looks(_sampled(scene, share or 1.0), store, work.progress, rounds, seconds)
    return looks, why


def _before(rows: tuple[Row, ...]) -> float | None:
    """Return the share of the records that a run trained on before."""
    return next((row["share"] for row in rows if row["kind"] == "share"), None)


def _least(scene: Scene) -> float:
    """Return the share of the records that makes one batch of the largest client's."""
    most = max(map(len, scene.clients))
    return min(1.0, (scene.config.batch_size or most) / most)


def _fitting(scene: Scene, rounds: int, a_round: float, seconds: float) -> tuple[int, float]:
    """Return how many rounds, on which share of the records, fit: fewer records go before fewer rounds."""
    if a_round <= 0:
        return rounds, 1.0
    share = max(_least(scene), min(1.0, seconds / (rounds * a_round)))
    return min(rounds, int(seconds / (share * a_round) + 1e-9)), share


def _sampled(scene: Scene, share: float) -> Scene:
    """Return the scene with a share of each client's records, and fewer examples to test on."""
    if share >= 1:
        return scene
    size = scene.config.batch_size or 1
    clients = [part[: max(min(size, len(part)), math.floor(share * len(part)))] for part in scene.clients]
    test = scene.dataset.test
    few = replace(test, images=test.images[:TESTED], labels=test.labels[:TESTED])
    return replace(scene, clients=clients, dataset=replace(scene.dataset, test=few))


def _said(scene: Scene, rounds: int, share: float) -> list[Row]:
    wanted = scene.config.rounds
    parts = [f"for {rounds} of {wanted} rounds"] if rounds < wanted else []
    parts += [f"on {share:.0%} of each client's records"] if share < 1 else []
    said = f"Trained {' '.join(parts)}: more do not fit in the time."
    return [{"kind": "share", "share": share}, *([{"kind": "note", "says": said}] if parts else [])]
