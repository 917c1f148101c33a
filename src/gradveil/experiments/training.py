"""Small problems on one thread: on a shared machine a second one costs many times what it brings."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn

from gradveil.experiments.run_folder import Row, RunFolder
from gradveil.experiments.scene import Scene
from gradveil.experiments.trial import Look
from gradveil.federated.client import evaluate
from gradveil.federated.simulate import simulate
from gradveil.tree import parameters, size

WEIGHTS = 100_000
NUMBERS = 256  # of one input


def is_small(model: nn.Module, input_shape: tuple[int, ...] = ()) -> bool:
    """Return whether one thread is enough for this model, and for inputs of this shape."""
    return size(parameters(model)) <= WEIGHTS and prod(input_shape) <= NUMBERS


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Within, torch runs on one thread, where wanted; the setting is put back afterwards."""
    before = torch.get_num_threads()
    try:
        if wanted:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


Progress = Callable[[str, int, int], None]  # stage, done, total


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
            store.add(unit, [*_server_rows(scene, defense), *rows], sent)
        done += rounds
        if rounds > 1:
            yield Look("last", rounds, defense, _restored(scene.model, store.arrays(unit)))
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


def _server_rows(scene: Scene, defense: str) -> list[Row]:
    return [
        {"kind": "defense", "defense": defense, "server": server.name, "why": server.why}
        for server in scene.countermeasures(defense, scene.model)
    ]


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def _restored(model: nn.Module, state: dict[str, Any]) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    return copied
