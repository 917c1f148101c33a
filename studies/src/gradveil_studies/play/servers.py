"""What each server makes of what the client sends, step by step: a run in a thread of its own that can be stopped."""

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Literal

import torch
from torch import Tensor

from gradveil import pace
from gradveil.attacks.rounds import pooled
from gradveil.errors import GradveilError, SpecError
from gradveil.metrics import measure
from gradveil.modalities.tokens import Tokens
from gradveil.seeds import Seeds
from gradveil.threats.panel import as_it_is, servers_of
from gradveil.threats.setup import is_small, one_thread
from gradveil.threats.trial import Trial, attempt, floors, observe
from gradveil.types import Batch
from gradveil_studies.play.stage import PlayStage

MOST_ROUNDS = 32
CONTROL = {"control": True}
EVERY = 0.05  # seconds between two pictures of one server, after the first


def trials(stage: PlayStage, one: Batch, spec: str, rounds: int = 1, seed: int = 0) -> list[Trial]:
    """Return who attacks: the oblivious server, those that know the defence and, with several rounds, the patient ones.

    Before them stands the control, where there is a defence: the same attack on an update without it.
    The client sends an update of the same example in each round, at the same weights, its random draws new in each;
    where it draws none, further rounds tell nothing.
    """
    if not 1 <= rounds <= MOST_ROUNDS:
        raise SpecError(f"{rounds} rounds are not offered. Choose 1 to {MOST_ROUNDS}.")
    defense, seeds, kind = stage.defense(spec), Seeds(seed), stage.dataset.modality
    model = copy.deepcopy(stage.model)  # an attack changes it for a while, and one that was stopped may still be at it
    public = (stage.classes, stage.public.prior)
    sent = [
        observe(model, one, defense, seeds("round", i), *public, local=stage.local, modality=kind)
        for i in range(rounds)
    ]
    knowing = () if spec == "none" else defense.servers(model)
    drawn = any(not torch.equal(g, sent[-1].update.gradient[n]) for n, g in sent[0].update.gradient.items())
    found = [] if spec == "none" else [replace(trials(stage, one, "none", seed=seed)[0], about=CONTROL)]
    for server in servers_of(("oblivious", "adaptive", "multi-round"), knowing, drawn=drawn):
        attack = stage.attack if isinstance(kind, Tokens) else server.attack or stage.attack
        trial = Trial(replace(sent[0], public=stage.public.batch), server, attack, seeds("attack", attack), one)
        if server.tier == "multi-round":
            every = replace(trial, seen=replace(sent[0], public=stage.public.batch, rounds=tuple(sent[1:])))
            trial = replace(trial, seen=pooled(every.view), server=replace(server, view=as_it_is))
        found.append(trial)
    return found


State = Literal["waiting", "searching", "done", "stopped", "refused"]


@dataclass(frozen=True)
class Rebuilt:
    """What one server has so far."""

    trial: Trial
    state: State = "waiting"
    shown: Tensor | None = None  # (*shape), as it was measured
    error: float = math.nan
    steps: int = 0
    why: str = ""  # it refuses


class LiveRun:
    """The trials one after the other, each step shown; ``stop`` ends it from any thread."""

    def __init__(self, stage: PlayStage, found: Sequence[Trial]) -> None:
        self.stage, self._trials = stage, list(found)
        self._got = [Rebuilt(trial) for trial in found]
        self._limit = pace.Limit(watch=self._watch)
        self._news: SimpleQueue[tuple[int, Rebuilt] | BaseException | None] = SimpleQueue()
        self._at = self._steps = 0  # the trial under way, and its steps so far
        self._told = -math.inf  # when it was shown last

    def stop(self) -> None:
        """End the run: the server at work keeps what it has after its step, the others do not begin."""
        self._limit.stop()

    def frames(self) -> Iterator[list[Rebuilt]]:
        """Yield what the servers have, again and again until all are done; who stops listening ends the run."""
        threading.Thread(target=self._work, daemon=True).start()
        try:
            yield list(self._got)
            while (news := self._news.get()) is not None:
                if isinstance(news, BaseException):
                    raise news
                i, got = news
                self._got[i] = got
                yield list(self._got)
        finally:
            self.stop()

    def _work(self) -> None:
        try:
            with self._limit, one_thread(is_small(self.stage.model, self.stage.dataset.input_shape)):
                for i, trial in enumerate(self._trials):
                    self._at, self._steps, self._told = i, 0, -math.inf
                    self._news.put((i, self._attacked(trial)))
            self._news.put(None)
        except BaseException as error:  # raised where somebody listens
            self._news.put(error)

    def _attacked(self, trial: Trial) -> Rebuilt:
        if self._limit.left <= 0:
            return Rebuilt(trial, "stopped")
        self._news.put((self._at, Rebuilt(trial, "searching")))
        result = attempt([trial])[0]
        if isinstance(result, GradveilError):
            return Rebuilt(trial, "refused", why=str(result))
        return self._measured("stopped" if self._limit.left <= 0 else "done", trial, result.inputs)

    def _watch(self, point: Tensor) -> None:
        self._steps += 1
        if pace.clock() - self._told >= EVERY:
            self._told = pace.clock()
            self._news.put((self._at, self._measured("searching", self._trials[self._at], point)))

    def _measured(self, state: State, trial: Trial, point: Tensor) -> Rebuilt:
        truth, kind = trial.truth, self.stage.dataset.modality
        assert truth is not None
        inputs = point.detach().flatten()[: truth.inputs.numel()].reshape(truth.inputs.shape).float()
        values, shown = measure(inputs, None, truth, modality=kind)
        return Rebuilt(trial, state, shown[0], float(values[kind.error][0]), self._steps)


def blind_guess(stage: PlayStage, one: Batch) -> tuple[str, Tensor, float]:
    """Return the best answer of somebody who never saw the update: its name, the example, its error."""
    kind = stage.dataset.modality
    rows, answers = floors(one, stage.public, modality=kind)
    best = min(rows, key=lambda row: float(row[kind.error]))
    shown = kind.unit(answers[best["guess"]], (0.0, 1.0))
    return str(best["guess"]), shown[0], float(best[kind.error])
