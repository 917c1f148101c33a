"""The attack step by step on one client's update: without a defence, and under the first defence that was asked for.

The attack is run once more on that update alone, with the same random numbers, and watched. Nothing is measured by it:
verdicts rest on the attacks themselves.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradveil import pace
from gradveil.auditing.run_folder import Row
from gradveil.auditing.work import AttackRunner
from gradveil.errors import GradveilError
from gradveil.modalities import IMAGE
from gradveil.threats.panel import Target, panel
from gradveil.threats.rows import Line, lines
from gradveil.threats.snapshots import first_snapshot
from gradveil.threats.trial import attempt
from gradveil.threats.verdict import by_tier

FILM = "film"  # the unit
FRAMES = 9  # of a film, the attack's answer the last of them
SLOWER = 1.3  # between two frames that are kept, the number of steps grows by this
SECONDS = 10.0  # for one film, at most; one that takes longer is left out
SHARE = 0.05  # of the time that is left, likewise


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
    """Write the films of a run, once; of images alone, since others do not come into view little by little."""
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
    keys = [_key(line) for line in best if line is not None]
    return [t for key in dict.fromkeys(keys) for t in targets if _target_key(t) == key]


def _key(line: Line) -> tuple[str, ...]:
    return line.defense, line.tier, line.server, line.attack


def _target_key(target: Target) -> tuple[str, ...]:
    return target.defense, target.server.tier, target.server.name, target.attack


def _film(work: AttackRunner, target: Target) -> tuple[Row, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] | None:
    """Return the row and the frames (F, *shape) of one attack; nothing where it takes no steps or too long."""
    trial, watcher = work.observed.trial(target), Watcher()
    with pace.Limit(min(SECONDS, SHARE * pace.left()), watch=watcher):
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
