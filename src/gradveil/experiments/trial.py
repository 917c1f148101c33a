"""The attack panel: who attacks what, the updates, the reconstructions, and their rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradveil.attacks.base import Attack
from gradveil.attacks.base import build as build_attack
from gradveil.countermeasures import Countermeasure, plain
from gradveil.errors import AttackError, UpdateError
from gradveil.experiments.rows import NAIVE
from gradveil.experiments.run_folder import Row
from gradveil.experiments.scene import Scene
from gradveil.federated.client import local_update
from gradveil.metrics import measure
from gradveil.types import Batch, Observation, Reconstruction, check_update

CHUNK = 96  # reconstruction problems that run together


@dataclass(frozen=True)
class Look:
    """One federation's model in one round: what the attacked clients received."""

    round: str  # "first" or "last"
    round_number: int
    weights: str  # "start", or the defence it was trained under
    model: nn.Module


@dataclass(frozen=True)
class Target:
    """One update to reconstruct, by one server with one attack."""

    look: Look
    defense: str
    server: Countermeasure
    attack: str
    victim: int  # which attacked client


def problems(scene: Scene, looks: Sequence[Look]) -> dict[str, list[Target]]:
    """Return the problems by attack: for each look the control, then each defence, naive and adaptive.

    In the first round all defences start from the same weights and share one control; later each federation
    has weights of its own, and its own control at those weights.
    """
    naive = replace(plain(), name=NAIVE)
    found: dict[str, list[Target]] = {}
    for look in looks:
        tried = [d for d in scene.defenses if d != "none" and look.weights in ("start", d)]
        wanted: dict[tuple[str, str, str], Countermeasure] = {("none", NAIVE, a): naive for a in scene.attacks}
        for defense in tried:
            wanted |= {(defense, NAIVE, a): naive for a in scene.attacks}
            for server in scene.countermeasures(defense, look.model):
                used = [_own_name(scene, server.attack)] if server.attack else list(scene.attacks)
                wanted |= {("none", NAIVE, a): naive for a in used}  # an attack is nothing without its control
                wanted |= {(defense, server.name, a): server for a in used}
        for (defense, _, attack), server in wanted.items():
            victims = range(scene.config.images // scene.config.examples)
            found.setdefault(attack, []).extend(Target(look, defense, server, attack, v) for v in victims)
    return found


def _own_name(scene: Scene, attack: str) -> str:
    """Return the panel's own settings of an attack that a countermeasure names without any."""
    return next((spec for spec in scene.attacks if spec.partition(":")[0] == attack), attack)


def chunks(found: Sequence[Target]) -> list[Sequence[Target]]:
    """Cut problems into parts of nearly equal size that run together; a part is the unit of work."""
    count = -(-len(found) // CHUNK)
    edges = [round(i * len(found) / count) for i in range(count + 1)]
    return [found[a:b] for a, b in pairwise(edges)]


def victim_truth(scene: Scene, victim: int) -> Batch:
    """Return the examples that one attacked client holds."""
    part = slice(victim * scene.config.examples, (victim + 1) * scene.config.examples)
    return Batch(scene.truth.inputs[part], scene.truth.labels[part])


def observe(scene: Scene, problem: Target) -> Observation:
    """Return all that the server sees: the client's update after one local step, and what is public."""
    rng = scene.seeds("defense", problem.defense, problem.look.round, problem.victim)
    batch = victim_truth(scene, problem.victim)
    update = local_update(
        problem.look.model, batch, scene.defenses[problem.defense], scene.config.lr, rng, batch_size=None
    )
    check_update(update, problem.look.model)
    seen = Observation(
        problem.look.model, update, scene.dataset.input_shape, scene.dataset.num_classes, prior=scene.public.prior
    )
    return problem.server.view(seen)


def run_chunk(scene: Scene, found: Sequence[Target]) -> tuple[list[Row], NDArray[Any]]:
    """Attack the problems of one chunk; return their rows, and the reconstructions by ``row["index"]``."""
    attack = scene.attacks.get(found[0].attack) or build_attack(found[0].attack)
    views: dict[int, Observation] = {}
    failed: dict[int, str] = {}
    for i, problem in enumerate(found):
        try:
            views[i] = observe(scene, problem)
        except UpdateError as error:
            failed[i] = str(error)
    rngs = {i: scene.seeds("attack", found[i].attack, found[i].look.round, found[i].victim) for i in views}
    results = attack_all(attack, views, rngs, failed)
    rows: list[Row] = []
    images: list[NDArray[Any]] = []
    for i, problem in enumerate(found):
        head = _head(problem)
        if i in failed:
            rows.append({"kind": "skip", **head, "why": failed[i]})
            continue
        values, paired = measure(
            results[i].inputs, results[i].labels, victim_truth(scene, problem.victim), scene.public.gallery
        )
        for n in range(scene.config.examples):
            numbers = {name: float(value[n]) for name, value in values.items()}
            rows.append(
                {"kind": "attack", **head, **_example(scene, problem, n, len(images)), **numbers, **said(results[i])}
            )
            images.append(paired[n].numpy())
    return rows, np.stack(images) if images else np.zeros((0, *scene.dataset.input_shape), np.float32)


def attack_all(
    attack: Attack,
    views: dict[int, Observation],
    rngs: dict[int, torch.Generator],
    failed: dict[int, str],
) -> dict[int, Reconstruction]:
    """Run all views together; where the attack refuses one, each alone, and note why it was refused."""
    try:
        found = attack.reconstruct_many(list(views.values()), list(rngs.values()))
        return dict(zip(views, found, strict=True))
    except AttackError:
        alone: dict[int, Reconstruction] = {}
        for i, seen in views.items():
            try:
                alone[i] = attack.reconstruct(seen, rngs[i])
            except AttackError as error:
                failed[i] = str(error)
        return alone


def said(found: Reconstruction) -> Row:
    """Return what the attack says of itself."""
    return {"objective": found.objective, "converged": found.converged, "details": found.details}


def _head(problem: Target) -> Row:
    return {
        "round": problem.look.round,
        "round_number": problem.look.round_number,
        "weights": problem.look.weights,
        "defense": problem.defense,
        "server": problem.server.name,
        "attack": problem.attack,
    }


def _example(scene: Scene, problem: Target, n: int, index: int) -> Row:
    return {
        "example": problem.victim * scene.config.examples + n,
        "index": index,
        "gallery": len(scene.public.gallery) + 1,
    }
