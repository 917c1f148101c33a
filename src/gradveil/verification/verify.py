"""``verify``: μ as it is measured, with its interval, beside μ as it is promised, and what the noise gives away.

Over the releases of a run a canary's score is x_j = Σ_r <released_r, u_jr>, so that x = A (b∘a) + σ A^½ n with the
Gram matrix A = Σ_r U_r U_rᵀ of the known directions, secret coins b_j and lengths a_j. Generalised least squares gives
the lengths and the noise σ with exact t statistics; a server that knows all other records tells one slot's coin with
μ_j = a_j √A_jj / σ. Guesses of the coins bound it without any law of the noise: Steinke, Nasr and Jagielski (2023) the
ε of (ε, δ)-DP; Mahloujifar, Melis and Chaudhuri (2025) a whole trade-off curve, here that of μ-Gaussian DP.

What is left of a release when the right candidate is taken off is the noise alone. torch's CPU normals come sixteen at
a time from 24-bit uniforms by Box-Muller in float32 (ATen/native/cpu/DistributionTemplates.h): entries i and i + 8 of a
block are r cos θ and r sin θ, with θ/2π on a lattice of 2⁻²⁴ and a generator that keeps 32 bits of its seed.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import exp, isfinite, pi, sqrt
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import binom
from torch import Tensor, nn

from gradveil import pace
from gradveil.errors import GradveilError
from gradveil.losses import Loss
from gradveil.losses import build as build_loss
from gradveil.tree import Params, parameters
from gradveil.types import Batch
from gradveil.verification.pipelines import Canaries, Foreign, Into, Pipeline, Trainer, gradients, make

Array = NDArray[np.float64]
ENOUGH = 8  # trials from which on each canary has a length of its own


@dataclass(frozen=True)
class Estimate:
    """μ and its interval, on average over canaries and for the worst of them."""

    mu: float
    low: float
    high: float
    worst: float  # the canary with the largest lower end, of all K at once
    worst_low: float
    confidence: float
    slots: int  # coins that were thrown


def fit(scores: Array, grams: Array, present: NDArray[np.bool_], base: bool, confidence: float) -> Estimate:
    """Fit scores (T, K) with Gram matrices (T, K, K) or (K, K) and coins (T, K).

    ``base``: something beside the canaries may be released, the same in every trial.
    """
    trials, count = scores.shape
    grams = np.broadcast_to(grams, (trials, count, count))
    apart, b = trials >= ENOUGH, present.astype(float)
    alike = bool((grams == grams[:1]).all())
    inverse = np.broadcast_to(_inverse(grams[:1] if alike else grams), grams.shape)
    own = grams * b[:, :, None]  # diag(b) A, and A⁻¹ cancels in what follows
    normal: Array = (own * b[:, None, :]).sum(0)
    right: Array = (b * scores).sum(0)
    if base and apart:
        beside, all_ = own.sum(0), grams.sum(0)
        normal = np.block([[normal, beside], [beside.T, all_]])
        right = np.concatenate([right, scores.sum(0)])
    if not apart:
        normal, right = np.full((1, 1), normal.sum()), np.full(1, right.sum())
    spread = _inverse(normal)
    found: Array = spread @ right
    total = float(np.einsum("tk,tkl,tl->", scores, inverse, scores, optimize=True))
    rank = int(np.linalg.matrix_rank(grams[0], hermitian=True))
    left = trials * rank - np.linalg.matrix_rank(normal, hermitian=True)
    sigma = sqrt(max(total - float(right @ found), 1e-30 * max(total, 1e-300)) / max(left, 1))
    size = np.sqrt(np.einsum("tkk->k", grams) / trials)  # √A_jj
    weights = np.zeros((count + 1, len(found)))
    weights[0, : count if apart else 1] = size / count if apart else size.mean()
    weights[1:, : count if apart else 1] = np.diag(size) if apart else size.mean()
    means, stds = weights @ found, np.sqrt(np.einsum("cq,qr,cr->c", weights, spread, weights))
    mu, low, high = interval(means[0], stds[0], sigma, left, confidence)
    each = interval(means[1:], stds[1:], sigma, left, 1 - (1 - confidence) / count) if apart else (mu, low, high)
    at = int(np.argmax(each[1])) if apart else 0
    worst, worst_low = (float(each[0][at]), float(each[1][at])) if apart else (float(mu), float(low))
    return Estimate(float(mu), float(low), float(high), worst, worst_low, confidence, b.size)


def _inverse(grams: Array) -> Array:
    found: Array = np.asarray(np.linalg.pinv(grams, rcond=1e-9, hermitian=True), np.float64)
    return found


def interval(mean: Any, std: Any, sigma: float, degrees: int, confidence: float) -> tuple[Any, Any, Any]:
    """Return mean/σ with its interval, where mean/(σ std) is noncentral t (Johnson and Welch's normal form)."""
    t, z = mean / (sigma * std), float(ndtri((1 + confidence) / 2))
    middle, width = t * (1 - 1 / (4 * degrees)), z * np.sqrt(1 + t**2 / (2 * degrees))
    return middle * std, np.maximum((middle - width) * std, 0.0), np.maximum((middle + width) * std, 0.0)


def from_outputs(scores: Array, grams: Array, ratio: float) -> Array:
    """Return what the outputs alone say of each coin (T, K), higher for in: no coin is used, as the bounds ask.

    ``ratio``: μ of one canary that is expected; it says how much the others' scores are worth beside the noise.
    """
    trials, count = scores.shape
    grams = np.broadcast_to(grams, (trials, count, count))
    size = max(float(np.einsum("tkk->", grams)) / grams[..., 0].size, 1e-300)
    length = max(2 * float(scores.sum()) / float(grams.sum()), 0.0)  # half of the slots are filled
    ridge = 4 * size / max(ratio, 1e-3) ** 2 * np.eye(count)
    centred = scores - length / 2 * grams.sum(2)
    return np.linalg.solve(grams + ridge, centred[..., None])[..., 0]


SHARE = 0.2  # of the slots are guessed, those with the most telling scores; fixed beforehand


@dataclass(frozen=True)
class Guessed:
    """Guesses of the most telling scores, half for in and half for out."""

    slots: int  # m
    made: int  # r
    right: int  # v

    def mu_low(self, confidence: float) -> float:
        """Return the largest μ that Gaussian DP is refuted for at this confidence; 0: none."""
        return _highest(lambda mu: self._refutes_mu(mu, 1 - confidence), 64.0)

    def epsilon_low(self, delta: float, confidence: float) -> float:
        """Return the largest ε that (ε, δ)-DP is refuted for at this confidence; 0: none."""
        return _highest(lambda epsilon: self._chance(epsilon, delta) < 1 - confidence, 64.0)

    def _refutes_mu(self, mu: float, level: float) -> bool:
        """Whether so many right guesses, at this level, would need more chances than there are (Mahloujifar et al.)."""
        share = level * self.made / self.slots
        r, h = share * self.right / self.made, share * (self.made - self.right) / self.made
        for i in range(self.right - 1, -1, -1):
            higher = max(h, float(ndtr(ndtri(min(r, 1.0)) - mu)))
            r += i / (self.made - i) * (higher - h)
            h = higher
            if r + h > self.made / self.slots:
                return True
        return False

    def _chance(self, epsilon: float, delta: float) -> float:
        """Return the most likely that so many guesses are right under (ε, δ)-DP (Steinke et al., theorem 5.2)."""
        likely = binom(self.made, 1 / (1 + exp(-epsilon)))
        tail = float(likely.sf(self.right - 1))
        if not delta or not self.right:
            return min(tail, 1.0)
        steps = np.arange(1, self.right + 1)
        gains = (likely.sf(self.right - 1 - steps) - tail) / steps
        return min(1.0, tail + 2 * self.slots * delta * float(gains.max()))


def guess(scores: np.ndarray, present: np.ndarray, share: float = SHARE) -> Guessed:
    """Guess in for the highest scores and out for the lowest, abstain in between; ``present`` says who is right."""
    flat, truth = scores.ravel(), present.ravel()
    each = max(1, int(share * len(flat) / 2))
    order = np.argsort(flat)
    right = int((~truth[order[:each]]).sum() + truth[order[-each:]].sum())
    return Guessed(len(flat), 2 * each, right)


def _highest(refuted: Callable[[float], bool], most: float) -> float:
    """Return where a condition that holds from 0 on ends, to a thousandth; 0 where it does not hold there."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, most
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


BLOCK, HALF = 16, 8
BITS = 24
SIGMAS = 6.0  # a chance of 1e-9 for a sound noise


def grain(residual: Array, starts: Sequence[int]) -> float:
    """Return by how many standard deviations the angles of pairs lie on torch's lattice; ``starts``: of the tensors.

    The angles of pairs that are no pairs of Box-Muller are taken off, so that a public grid on which everything is
    rounded counts for nothing.
    """
    blocks = [_blocks(part) for part in np.split(residual, starts[1:])]
    found = np.concatenate([b for b in blocks if len(b)] or [np.empty((0, BLOCK))])
    if not len(found):
        return 0.0
    right = _on_lattice(found[:, :HALF], found[:, HALF:])
    wrong = _on_lattice(found[:, :HALF], np.roll(found[:, HALF:], 1, axis=1))
    return float(np.mean(right - wrong)) * sqrt(right.size)  # each a cosine, of variance ½


def _blocks(part: Array) -> Array:
    whole = len(part) // BLOCK * BLOCK
    if len(part) < BLOCK:
        return np.empty((0, BLOCK))
    return part[: whole if whole == len(part) else whole - BLOCK].reshape(-1, BLOCK)  # the last is drawn again


def _on_lattice(cosine: Array, sine: Array) -> Array:
    turns = np.arctan2(sine, cosine) / (2 * pi) * 2.0**BITS
    return np.cos(2 * pi * turns)


def seed_of(residual: Array, starts: Sequence[int], seeds: range, before: Sequence[int] = (0,)) -> int | None:
    """Return the seed of a torch CPU generator whose first normals are the residual's, up to a factor; None: no one.

    ``before``: how many draws of the generator may come before them.
    """
    if not residual[: starts[1] if len(starts) > 1 else None].size >= BLOCK:  # short: drawn in another way
        return None
    seen = residual[:BLOCK] / np.linalg.norm(residual[:BLOCK])
    rng = torch.Generator()
    for seed in seeds:
        for skipped in before:
            rng.manual_seed(seed)
            torch.rand(skipped, generator=rng)
            normals = torch.randn(BLOCK, generator=rng).double().numpy()
            if seen @ normals > (1 - 1e-4) * np.linalg.norm(normals):
                return seed
    return None


def reused(residuals: Sequence[Array]) -> float:
    """Return the largest correlation of two releases' noise, in standard deviations of independent ones."""
    if len(residuals) < 2:
        return 0.0
    rows = np.stack([e / max(float(np.linalg.norm(e)), 1e-300) for e in residuals])
    alike = np.abs(rows @ rows.T - np.eye(len(rows)))
    return float(alike.max() * sqrt(rows.shape[1]))


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
    pipeline = train if isinstance(train, Pipeline) else Foreign(train, clip=clip)
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
