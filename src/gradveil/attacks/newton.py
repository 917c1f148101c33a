"""Gauss-Newton on the update itself: few steps, and the strongest known attack on noise."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import (
    ATTACKS,
    AppliesTo,
    Attack,
    check_seen,
    differentiating,
    in_groups,
    in_parts,
    peak_bytes,
)
from gradveil.attacks.labels import with_labels
from gradveil.attacks.rounds import pooled
from gradveil.attacks.search.equations import Equations, Prior, refuse_recurrent, stack
from gradveil.attacks.search.gauss_newton import WIDEST, BestStarts, DenseStep, Descent, MatrixFree, Solver
from gradveil.attacks.search.update_equations import Guess, free_of, known_bias, update_rows
from gradveil.ranges import Count, Positive, Whole
from gradveil.types import Observation, Reconstruction

MEMORY = 2e9  # bytes for the Jacobian, or for the problems that run together
LITTLE = 2**18  # equations of an update, up to which what a problem takes need not be measured


@ATTACKS.register("newton")
@dataclass(frozen=True)
class Newton(Attack):
    """Solve the update's equations for the input by Levenberg-Marquardt with a Gaussian prior: a MAP estimate.

    The noise floor and the rounding of ReLU kinks are annealed; the bias gradient of the last layer, p - y for a
    batch of one, is put into the backward pass where it is seen without noise. Noise levels the server knows
    weigh the equations; tensors it dropped have none. Where the targets of one step cannot be read, the slope of the
    loss by the outputs is an unknown instead, and they are read off the solution. For inputs of many numbers the
    Jacobian is never written out: conjugate gradients on products with it. An update of several local steps is unrolled
    (``fedavg_unroll``). The likelihoods of several rounds are added: rounds at the same weights are averaged, which is
    the same, and the equations of rounds at other weights go below one another.
    """

    kind = "search"
    applies_to = (AppliesTo(model="small", default=""), AppliesTo())

    steps: Count = 60  # in all, at most
    restarts: Count = 1  # the first from the prior's mean, others from draws of the prior
    floor: Positive = 3.0  # first noise floor, relative to the root mean square of each tensor's gradient
    dense_limit: Whole = 1024  # unknowns up to which the Jacobian is written out
    cg_steps: Count = 60  # of conjugate gradients per step, beyond that

    def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return in_groups(ready(seen, rngs, "newton"), rngs, problem_group, self._in_parts)

    def _in_parts(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return in_parts(seen, rngs, len(seen), lambda part: self.solve(seen[part], rngs[part]))

    def solve(
        self, seen: Sequence[Observation], rngs: Sequence[Generator], near: Tensor | None = None
    ) -> list[Reconstruction]:
        """Solve one group of problems (see ``ready`` and ``problem_group``), from inputs ``near`` (B, N d) if given."""
        first = seen[0]
        device = next(first.model.parameters()).device
        rounds = [list(same) for same in zip(*((s, *s.rounds) for s in seen), strict=True)]  # by round, then problem
        own = [0 if free_of(same[0]) == "nothing" else first.num_examples * first.num_classes for same in rounds]
        prior = Prior.of(first, sum(own), device)
        alone = [replace(prior, extra=count) for count in own]
        guesses = [
            [Guess.of(s, part, rng) for s, rng in zip(same, rngs, strict=True)]
            for same, part in zip(rounds, alone, strict=True)
        ]
        if near is None:
            starts = torch.stack([self._starts(prior, rng) for rng in rngs])  # (B, r, n)
        else:
            starts = torch.cat([near, near.new_zeros(len(near), prior.extra)], 1)[:, None]
        for same in rounds:
            refuse_recurrent(same[0].model)
        with differentiating(first.model):
            parts = list(map(update_rows, rounds, guesses, alone))
        rows = stack(parts, prior.pixels, own)
        dense = starts.shape[-1] <= self.dense_limit and rows.seen.shape[1] * starts.shape[-1] * 8 <= MEMORY
        direction = DenseStep(prior) if dense else MatrixFree(prior, self.cg_steps)
        entries = torch.cat([_entries(same[0], part.seen) for same, part in zip(rounds, parts, strict=True)])
        solver = Solver(prior, Descent(self.steps, first=self.floor), direction, entries)
        with differentiating(first.model):
            each = 8.0 * 40 * rows.seen.shape[1] if dense else self._bytes_each(rows, starts)
            best = solver.best(rows, starts, together=max(1, int(MEMORY / each)))
        return [self._rebuilt(s, guess, best, b) for b, (s, guess) in enumerate(zip(seen, guesses[0], strict=True))]

    def _bytes_each(self, rows: Equations, starts: Tensor) -> float:
        """Return what one problem takes at a step that does not write the Jacobian out, measured on one."""
        if starts.shape[0] * starts.shape[1] == 1 or rows.seen.shape[1] <= LITTLE:
            return 8.0 * 40 * rows.seen.shape[1]
        one, x = rows.take(torch.zeros(1, dtype=torch.long, device=starts.device)), starts[:1, 0]
        run = partial(one.curvature, x, one.weights, x.new_full((1,), WIDEST))
        return max(1.0, peak_bytes(lambda: run()(x), x.device))

    def _starts(self, prior: Prior, rng: Generator) -> Tensor:
        """Return the starts of one problem (restarts, n): the mean, then draws.

        Several unknown examples never start alike: equal examples of one class would stay equal for ever.
        """
        away = prior.draw(self.restarts, rng)
        away[0] *= 0.0 if prior.examples == 1 else 0.1
        return prior.center() + away

    def _rebuilt(self, s: Observation, guess: Guess, best: BestStarts, b: int) -> Reconstruction:
        pixels = s.num_examples * int(torch.Size(s.input_shape).numel())
        inputs = best.point[b, :pixels].reshape(s.num_examples, *s.input_shape).to(torch.float32)
        labels = guess.targets(s, inputs, best.point[b, pixels : pixels + guess.value.numel()])
        value = float(best.objective[b])
        late = bool(best.late[b])
        finished = bool(best.steps[b] < self.steps) and value < float("inf") and not late
        starts = float(self.restarts)
        details = {"steps": float(best.all_steps[b]), "restarts": starts, "floor": float(best.floor[b])}
        details |= {"out_of_time": 1.0} if late else {}
        return Reconstruction(inputs.clamp(*s.bounds), labels, value, finished, details)


def ready(seen: Sequence[Observation], rngs: Sequence[Generator], attack: str) -> list[Observation]:
    """Return the observations as equations are made from them: labels read, and of one step where that is exact."""
    every = [r for s in seen for r in (s, *s.rounds)]
    check_seen(every, sizes_for=attack)
    labelled = with_labels([pooled(s) for s in seen], rngs)
    return [replace(_one_step(s), rounds=tuple(_one_step(r, s.labels) for r in s.rounds)) for s in labelled]


def _one_step(s: Observation, labels: Tensor | None = None) -> Observation:
    s = s if labels is None else replace(s, labels=labels)
    return s.as_one_step() if s.update.num_steps == 1 else s


def _entries(s: Observation, rows: Tensor) -> Tensor:
    """Return which rows (B, R) are of the update: not the last ones, that speak of free logits."""
    logits = s.num_examples * s.num_classes if free_of(s) == "logits" else 0
    return torch.arange(rows.shape[1], device=rows.device) < rows.shape[1] - logits


def problem_group(s: Observation) -> tuple[object, ...]:
    """Return what problems that are solved together have in common."""
    return (_alike(s), *map(_alike, s.rounds))


def _alike(s: Observation) -> tuple[object, ...]:
    local = (s.update.num_steps, s.num_examples, s.update.lr, s.update.batch_size, s.update.rule)
    same = (id(s.model), id(s.prior), id(s.simulate), s.loss, s.labels is None)
    return (*same, *local, s.visible, s.input_shape, s.num_classes, s.bounds, known_bias([s]))
