"""``verify``: μ as it is measured, with its interval, beside μ as it is promised, and what the noise gives away."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradveil import pace
from gradveil.errors import GradveilError
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.tree import Params, parameters
from gradveil.types import Batch
from gradveil.verification.estimate import (
    ENOUGH,
    SIGMAS,
    Estimate,
    Guessed,
    fit,
    from_outputs,
    grain,
    guess,
    reused,
    seed_of,
)
from gradveil.verification.pipelines import Canaries, Foreign, Into, Pipeline, Trainer, gradients, make

Verdict = Literal["consistent", "exceeds the promise", "says little"]
CONFIDENCE = 0.999  # of the interval of μ, of the worst canary's and of the bound from guesses, each
LITTLE = 0.8  # of the promise: an interval that ends below says that the canaries are not sharp
KEPT = 4  # trials whose noise is held beside that of the others
DELTA = 1e-5


@dataclass(frozen=True)
class Verified:
    """What was measured of a pipeline, beside what it promises."""

    pipeline: str
    promised: float  # μ
    estimate: Estimate
    guessed: Guessed
    canaries: int
    trials: int
    releases: int  # of a trial
    grain: float | None  # standard deviations; None: not looked for
    reused: float | None
    seed: int | None  # that redraws the noise
    seeds: int  # that were tried

    @property
    def guess_low(self) -> float:
        """The largest μ that the guesses refute, whatever the law of the noise."""
        return self.guessed.mu_low(self._either_sign)

    @property
    def _either_sign(self) -> float:
        """The confidence of a bound that may be met by guesses or by their opposites."""
        return (1 + self.estimate.confidence) / 2

    @property
    def reasons(self) -> list[str]:
        """Why the promise is exceeded; empty where nothing says so."""
        found = []
        if self.estimate.low > self.promised:
            found.append(f"μ is at least {self.estimate.low:.3g}")
        if self.estimate.worst_low > self.promised:
            found.append(f"for one record μ is at least {self.estimate.worst_low:.3g}")
        if self.guess_low > self.promised:
            found.append(f"guesses of the coins need a μ of at least {self.guess_low:.3g}")
        if self.seed is not None:
            found.append(f"the noise is that of torch's seed {self.seed}, so it can be drawn again")
        if self.grain is not None and self.grain > SIGMAS:
            found.append(
                f"the noise has a grain ({self.grain:.0f} standard deviations): the right candidate shows by it"
            )
        if self.reused is not None and self.reused > SIGMAS:
            found.append(
                f"two releases share noise (correlated by {self.reused:.0f} standard deviations): their difference "
                "takes it off"
            )
        return found

    @property
    def verdict(self) -> Verdict:
        if self.reasons:
            return "exceeds the promise"
        return "says little" if self.estimate.high < LITTLE * self.promised else "consistent"

    def to_json(self) -> dict[str, Any]:
        e = self.estimate
        return {
            "pipeline": self.pipeline, "mu_proved": self.promised if isfinite(self.promised) else None,
            "mu_measured": e.mu, "low": e.low, "high": e.high, "confidence": e.confidence, "verdict": self.verdict,
            "reasons": self.reasons, "worst_record": {"mu": e.worst, "low": e.worst_low},
            "guesses": {
                "slots": self.guessed.slots, "made": self.guessed.made, "right": self.guessed.right,
                "mu_low": self.guess_low, "epsilon_low": self.guessed.epsilon_low(DELTA, self._either_sign),
                "delta": DELTA,
            },
            "canaries": self.canaries, "trials": self.trials, "releases": self.releases,
            "noise": {"grain": self.grain, "reused": self.reused, "seed": self.seed, "seeds_tried": self.seeds},
        }  # fmt: skip


def verify(
    train: Trainer | Pipeline,
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    mu: float | None = None,
    canaries: int = 32,
    trials: int = 64,
    minutes: float | None = None,
    seeds: int = 0,
    seed: int | None = None,
    clip: float = 1.0,
    loss: str = "cross_entropy",
    own: bool = False,
    grain: bool | None = None,
) -> Verified:
    """Send canary records through a pipeline, each put in or left out by a coin, and measure its μ from what is sent.

    Args:
        train: ``train(model, inputs, labels, present)`` trains the model on the records that are present and returns
            what is released: the weights after each release, or gradients as vectors; or a ``Pipeline``.
        model: as the server sends it; it stays as it is.
        inputs: some examples, which canaries resemble in shape and kind.
        labels: of these examples.
        mu: what is promised; a pipeline of this package says it itself.
        canaries: records of a trial.
        trials: runs, with coins of their own.
        minutes: no further trial is begun after so many; the rules do not look at what was found.
        seeds: of torch that are tried against one release.
        seed: of canaries and coins; None draws from the operating system.
        clip: that the trainer has; canaries are made to exceed it.
        loss: that the trainer minimises.
        own: use the given examples themselves as canaries.
        grain: look for the grain of torch's noise; None: where the noise is meant to be secret.
    """
    pipeline = train if isinstance(train, Pipeline) else Foreign(train, clip_=clip)
    rng = torch.Generator()
    rng.seed() if seed is None else rng.manual_seed(seed)
    minimised = build_loss(loss).of(labels)
    like, into = Batch(inputs, labels), pipeline.into(model, dict(parameters(model)))
    chosen = Canaries(inputs, labels) if own else make(model, like, canaries, rng, minimised, pipeline.clip, into)
    look = pipeline.secret if grain is None else grain
    with pace.Limit(pace.seconds_of(minutes)) if minutes is not None else nullcontext():
        seen = _run(pipeline, model, chosen, trials, rng, minimised, empty=look or seeds > 0)
    promised = pipeline.promised if mu is None else mu
    if float((seen.scores * (seen.present - 0.5)).sum()) < 0:  # a difference of weights points against the gradient
        seen.scores *= -1
    found = fit(seen.scores, seen.grams, seen.present, pipeline.base, CONFIDENCE)
    ratio = found.mu if not isfinite(promised) else promised
    guessed = guess(from_outputs(seen.scores, seen.grams, ratio), seen.present)
    starts = _starts(model)
    alone = seen.alone
    return Verified(
        pipeline=pipeline.name, promised=promised, estimate=found, guessed=guessed, canaries=len(chosen),
        trials=len(seen.scores), releases=seen.releases,
        grain=_grain(alone, starts) if look and alone else None,
        reused=reused([*seen.kept, *alone]) if pipeline.fresh else None,
        seed=next((s for e in alone[:1] if (s := seed_of(e, starts, range(seeds), pipeline.before)) is not None), None),
        seeds=seeds if alone else 0,
    )  # fmt: skip


Array = NDArray[np.float64]


@dataclass
class _Runs:
    """Scores of all trials, and some releases whole."""

    scores: Array  # (T, K)
    grams: Array  # (T, K, K)
    present: NDArray[np.bool_]  # (T, K)
    releases: int
    kept: list[Array]  # noise beside the canaries
    alone: list[Array]  # noise without any record


def _run(
    pipeline: Pipeline, model: nn.Module, chosen: Canaries, trials: int, rng: torch.Generator, loss: Loss, empty: bool
) -> _Runs:
    """Run the pipeline; the first of its trials has no record at all, where the noise is to be looked at."""
    count = len(chosen)
    empty = empty and not (chosen.inputs.dtype == torch.int64 and not isinstance(pipeline, Foreign))
    present = torch.rand((trials, count), generator=rng) < 0.5
    while not bool(present.any(1).all()):  # of eight slots or more next to never
        present[~present.any(1)] = torch.rand((int((~present.any(1)).sum()), count), generator=rng) < 0.5
    rows = torch.cat([torch.zeros((1, count), dtype=torch.bool), present]) if empty else present
    scores, grams = np.zeros((trials, count)), np.zeros((trials, count, count))
    kept: list[Array] = []
    alone: list[Array] = []
    counts = np.zeros(trials, int)
    at: tuple[Params, Tensor, Array, Into] | None = None
    for one in pipeline.run(model, chosen, rows.to(chosen.inputs.device)):
        trial = one.trial - int(empty)
        if pace.step(one.trial, len(rows)) and pipeline.trial_by_trial and trial >= ENOUGH:
            break
        if not bool(one.vector.isfinite().all()):
            raise GradveilError(f"Trial {one.trial + 1} released numbers that are not finite. Lower its learning rate.")
        if at is None or at[0] is not one.weights:
            into = pipeline.into(model, one.weights)
            g = into(gradients(model, one.weights, chosen, loss))
            u = (g / g.norm(dim=1, keepdim=True).clamp_min(1e-30)).nan_to_num()
            at = one.weights, u, (u @ u.T).double().cpu().numpy(), into
        _, u, gram, into = at
        vector = into(one.vector.to(u))
        if trial < 0:
            alone.append(vector.double().cpu().numpy())
            continue
        counts[trial] += 1
        scores[trial] += (u @ vector).double().cpu().numpy()
        grams[trial] += gram
        if trial < KEPT:
            kept.append(_beside(vector, u))
    done = int((counts == counts[0]).sum())
    if not counts[0] or (counts[:done] != counts[0]).any() or (done < trials and pace.left() > 0):
        raise GradveilError(f"Trials released {sorted(set(counts))} times. Each has to release as often as the others.")
    return _Runs(scores[:done], grams[:done], present.numpy()[:done], int(counts[0]), kept, alone)


def _beside(vector: Tensor, u: Tensor) -> Array:
    span = torch.linalg.qr(u.double().T).Q  # (p, K)
    wide = vector.double()
    found: Array = (wide - span @ (span.T @ wide)).cpu().numpy()
    return found


def _grain(alone: Sequence[Array], starts: Sequence[int]) -> float:
    """Return the grain of several releases together, drawn as one vector or tensor by tensor."""
    ways = (starts, [0])
    return max(sum(grain(e, way) for e in alone) / sqrt(len(alone)) for way in ways)


def _starts(model: nn.Module) -> list[int]:
    sizes = [p.numel() for p in parameters(model).values()]
    return [sum(sizes[:i]) for i in range(len(sizes))]
