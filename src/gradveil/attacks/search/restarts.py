"""A search from several starts: as many problems together as fit into memory, the best start of each kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from gradveil.attacks.base import differentiating, in_groups, in_parts, peak_bytes
from gradveil.attacks.labels import read_at
from gradveil.attacks.search.matching import (
    Distance,
    Matching,
    MatchingObjective,
    Penalty,
    TotalVariation,
    Unknowns,
    cosine_distance,
    stack_key,
    statistics_term,
)
from gradveil.attacks.search.minimise import LBFGS, Adam, Optimiser, Solution, Stopping, minimise
from gradveil.errors import AttackError
from gradveil.gradients.by_hand import wide
from gradveil.gradients.functional import alone_pays, full_precision
from gradveil.types import Observation, Reconstruction

ON_CPU = 2 * 2**30  # bytes that a run may take
MOST_ON_CPU = 128  # more problems at once gain nothing there
LITTLE = 2**18  # numbers of an update and an image, up to which that many fit in any case


def problems_at_once(objective: MatchingObjective, optimiser: Optimiser) -> int:
    """Return how many problems like these to run together: as many as fit into half of what is free.

    What one of them takes is measured on an evaluation, unless it is little; what the optimiser keeps is added.
    """
    stack, unknowns = objective.matching, objective.unknowns
    kept = unknowns.size * (2 * optimiser.history + 20 if isinstance(optimiser, LBFGS) else 10)
    update = sum(g[0].numel() for g in stack.target.values())
    point = stack.floor.new_full((len(stack), unknowns.size), sum(unknowns.bounds) / 2)
    taken = 0.0
    if point.is_cuda or update + unknowns.size > LITTLE:
        taken = peak_bytes(lambda: objective(point), point.device) / len(stack)
    each = taken + point.element_size() * (kept + update)
    if point.is_cuda:
        free, _ = torch.cuda.mem_get_info(point.device)
        return max(1, int(free / 2 / each))
    return max(1, min(MOST_ON_CPU, int(ON_CPU / each)))


Start = Literal["uniform", "central", "grey", "normal"]
"""How the images of a start are drawn: uniformly within the bounds; around their middle, with a quarter of their
range as standard deviation (what N(0, 1) comes to on normalised images), or a fiftieth; or from N(0, 1)."""
SPREADS = {"central": 1 / 4, "grey": 1 / 50}


Terms = Callable[[Sequence[Observation], Unknowns, Tensor, Tensor], tuple[Penalty, ...]]
TVS = (0.3, 0.1, 0.03)  # the grid of weights of the total variation that one is chosen from
COOLER = 0.5  # times the step, for those of the grid that go on after a round


def no_terms(seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor, tv: Tensor) -> tuple[Penalty, ...]:
    """Return nothing beside the distance."""
    return ()


@dataclass(frozen=True)
class Search:
    """How to look for the inputs behind an update; an attack is a choice of these.

    A reconstruction counts as converged when it is finite and its gradient was matched: the distance is at most
    ``tol``, relative to the target's squared norm, beyond what known noise leaves.
    """

    distance: Distance
    optimiser: Callable[[Unknowns, int], Optimiser]  # for so many evaluations
    steps: int  # evaluations per start
    restarts: int = 1  # starts per update, the best by their own objective is kept
    start: Start = "uniform"
    tol: float = 1e-7  # relative distance at which the gradient counts as matched
    stop: bool = True  # end an image's run when a start has matched
    patience: int = 500  # steps without progress before a start is given up
    cuts: tuple[float, ...] = ()  # shares of the run at which the slower half of the starts is dropped
    penalties: Terms = no_terms  # of problems (P,) with these owners and these weights of the total variation
    tv: tuple[float, ...] = (0.0,)  # weights of the total variation; of several, one is chosen for each update
    scaled: bool = True  # whether the distance grows with the gradient's square, so that tol is relative to it
    stack: Callable[[Sequence[Observation]], Matching] = Matching.of  # how a group of observations is stacked
    own: int = 0  # further numbers to look for, from 0; the stack knows what they are
    tf32: bool = False  # let CUDA round products: only for optimisers that need no exact descent

    def run(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        return in_groups(seen, rngs, stack_key, self._run_stack)

    def _run_stack(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
        """Return the reconstructions of observations that can be stacked, as many at once as fit into memory."""
        stack, unknowns = self.stack(seen), Unknowns.of(seen[0], self.own)
        size = self._together(seen, stack, unknowns)

        def solve(part: slice) -> list[Reconstruction]:
            rows = torch.arange(len(seen), device=stack.floor.device)[part]
            with full_precision(not self.tf32, wide(seen[0].model.modules())), differentiating(seen[0].model):
                return self._solve(seen[part], rngs[part], stack.take(rows), unknowns)

        return in_parts(seen, rngs, size, solve)

    def _together(self, seen: Sequence[Observation], stack: Matching, unknowns: Unknowns) -> int:
        """Return how many updates to attack at once."""
        if len(seen) == 1 or alone_pays(stack.model):
            return 1
        owner = torch.zeros(2, dtype=torch.long)  # two problems: they go the way that many go
        two = stack.take(owner.to(stack.floor.device))
        objective = self._objective(seen[:1], two, unknowns, owner, two.floor.new_full((2,), self.tv[0]))
        with full_precision(not self.tf32), differentiating(seen[0].model):
            return max(1, problems_at_once(objective, self.optimiser(unknowns, self.steps)) // self.restarts)

    def _objective(
        self, seen: Sequence[Observation], problems: Matching, unknowns: Unknowns, owner: Tensor, tv: Tensor
    ) -> MatchingObjective:
        labels = _labels(seen, owner, problems.floor.device, problems.floor.dtype)
        return MatchingObjective(problems, unknowns, labels, self.distance, self.penalties(seen, unknowns, owner, tv))

    def _solve(
        self, seen: Sequence[Observation], rngs: Sequence[Generator], stack: Matching, unknowns: Unknowns
    ) -> list[Reconstruction]:
        device, dtype = stack.floor.device, stack.floor.dtype
        children = [child for rng in rngs for child in children_of(rng, self.restarts)]
        owner = torch.arange(len(seen)).repeat_interleave(self.restarts)

        def start(i: int) -> Tensor:
            z = self._start(unknowns, children[i])
            return _with_numbers(seen[int(owner[i])], unknowns, z, children[i]).to(device, dtype)

        problems = stack.take(owner.to(device))
        z, tv, before = self._chosen(seen, problems, unknowns, owner, start)
        objective = self._objective(seen, problems, unknowns, owner, tv)
        limit = self._limit(problems)
        goal = limit if self.stop else torch.full_like(limit, -torch.inf)
        cuts = tuple(int(share * self.steps) for share in self.cuts)
        stopping = Stopping(owner, goal.cpu(), self.patience, cuts=cuts)
        left = self.steps - before
        optimiser = self._optimiser(unknowns, left, len(self.tv) - 1 if before else 0)
        solution = minimise(objective, optimiser, z, left, stopping, start, 50, before, self.steps)
        residuals = objective.residual(solution.best)
        energy = problems.energy if self.scaled else None
        found = [_choose(s, unknowns, solution, residuals, limit, energy, stopping, i) for i, s in enumerate(seen)]
        if before:
            mine = tv[:: self.restarts].tolist()
            found = [replace(r, details=r.details | {"tv": weight}) for r, weight in zip(found, mine, strict=True)]
        if unknowns.labels and unknowns.loss.targets == "numbers" and self.distance is cosine_distance:
            return [replace(one, labels=None) for one in found]  # a direction does not tell them
        return found

    def _chosen(
        self, seen: Sequence[Observation], problems: Matching, unknowns: Unknowns, owner: Tensor,
        start: Callable[[int], Tensor],
    ) -> tuple[Tensor, Tensor, int]:  # fmt: skip
        """Return where to go on from (P, d), the weight of the total variation (P,), and the evaluations spent.

        The weights of the grid go on together, and after each round the worst is left behind, until one has a share of
        the evaluations left for itself. Objectives of different weights cannot be compared, and the distance alone is
        the least where smoothness counts least: their product decides (see ``corner``).
        """
        count, z = len(self.tv), torch.stack([start(i) for i in range(len(owner))])
        grid, at = z.new_tensor(self.tv), torch.arange(len(owner), device=z.device)
        if count == 1 or len(unknowns.images) != 4 or self.steps < count**2:
            return z, grid[:1].expand(len(z)), 0
        points, order, spent = z.expand(count, *z.shape).clone(), torch.arange(count, device=z.device)[:, None], 0
        order = order.expand(count, len(z))  # (C, P): the weights, the best first
        for alive in range(count, 1, -1):
            each, scores = self.steps // (count * alive), []
            for one in order[:alive]:
                objective = self._objective(seen, problems, unknowns, owner, grid[one])
                stopping = Stopping(owner, torch.full((len(z),), -torch.inf), each)
                optimiser = self._optimiser(unknowns, each, count - alive)
                solution = minimise(objective, optimiser, points[one, at], each, stopping, start, 50, spent, self.steps)
                points[one, at] = solution.best
                spent += int(solution.evaluations.max()) if bool(solution.late.any()) else each  # where it was cut off
                rough = TotalVariation(1.0)(unknowns.split(solution.best)[0])
                scores.append((objective.residual(solution.best), rough))
            distance, rough = (torch.stack(part) for part in zip(*scores, strict=True))
            order = order[:alive].gather(0, corner(distance, rough, owner.to(z.device)))[: alive - 1]
        return points[order[0], at], grid[order[0]], spent

    def _optimiser(self, unknowns: Unknowns, steps: int, rounds: int) -> Optimiser:
        """Return the optimiser of a search that goes on after so many rounds of the grid: with shorter steps."""
        fresh = self.optimiser(unknowns, steps)
        return replace(fresh, lr=fresh.lr * COOLER**rounds) if isinstance(fresh, Adam) else fresh

    def _start(self, unknowns: Unknowns, rng: Generator) -> Tensor:
        low, high = unknowns.bounds
        draw = torch.rand if self.start == "uniform" else torch.randn
        x = draw(unknowns.pixels, generator=rng, device=rng.device)
        if self.start == "uniform":
            x = low + (high - low) * x
        elif self.start in SPREADS:
            x = (low + high) / 2 + (high - low) * SPREADS[self.start] * x
        targets = torch.randn(unknowns.size - unknowns.pixels - unknowns.own, generator=rng, device=rng.device)
        return torch.cat([x, targets, torch.zeros(unknowns.own, device=rng.device)])

    def _limit(self, problems: Matching) -> Tensor:
        """Return the distance (P,) at which a gradient counts as matched; known noise cannot be matched away."""
        if not self.scaled:
            return torch.full_like(problems.energy, self.tol)
        return self.tol * problems.energy + 1.5 * problems.floor


FAR = 4.0  # times the least distance along a grid, beyond which a weight has given up the update for smoothness


def corner(distance: Tensor, rough: Tensor, owner: Tensor) -> Tensor:
    """Return in which order C weights suit each start (C, P), the same for all starts of an update.

    The least product of distance and total variation, (C, P) each, comes first: no unit changes it, and it is where one
    begins to cost more than the other brings. Weights whose distance is ``FAR`` beyond the least come last.
    """
    tiny = torch.finfo(distance.dtype).tiny
    score = distance.clamp_min(tiny).log() + rough.clamp_min(tiny).log()
    lost = ~distance.isfinite() | (distance > FAR * distance.nan_to_num(torch.inf).amin(0))
    score = score.masked_fill(lost | score.isnan(), 1e6)
    total = score.new_zeros(len(score), int(owner.max()) + 1).index_add(1, owner, score)
    return total.argsort(dim=0, stable=True)[:, owner]


def image_terms(bn: float) -> Terms:
    """Return total variation where there are images, and statistics of batch norm where the client sent them."""

    def terms(seen: Sequence[Observation], unknowns: Unknowns, owner: Tensor, tv: Tensor) -> tuple[Penalty, ...]:
        smooth = (TotalVariation(tv),) if len(unknowns.images) == 4 and bool((tv > 0).any()) else ()
        return (*smooth, *statistics_term(seen, owner, bn))

    return terms


def adam_search(
    steps: int, lr: float, tv: float | tuple[float, ...] = 0.0, terms: Terms = no_terms, pixels: bool = False,
    **more: Any,
) -> Search:  # fmt: skip
    """Return a search for a direction, of so many evaluations by Adam to its last step; ``more``: settings of it.

    Pixels go by signed steps within the bounds (Geiping et al. 2020), other numbers freely.
    """

    def optimiser(unknowns: Unknowns, count: int) -> Adam:
        return Adam(count, lr, pixels, unknowns.pixels if pixels else 0, unknowns.bounds)

    more |= {"stop": False, "patience": steps, "scaled": False, "penalties": terms}
    more["tv"] = tv if isinstance(tv, tuple) else (tv,)
    return Search(cosine_distance, optimiser, steps, **more)


def children_of(rng: Generator, count: int) -> list[Generator]:
    """Return generators of their own for the starts of one update, so that none depends on another's draws."""
    seeds = torch.randint(2**62, (count,), generator=rng, device=rng.device).tolist()
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def _with_numbers(seen: Observation, unknowns: Unknowns, z: Tensor, rng: Generator) -> Tensor:
    """Return a start whose targets, where they are unknown numbers of any size, fit its images and the update."""
    if not unknowns.labels or unknowns.loss.targets != "numbers":
        return z
    numbers = read_at(seen, z[: unknowns.pixels].reshape(unknowns.images), rng)
    if numbers is None:
        return z
    return torch.cat([z[: unknowns.pixels], numbers.flatten().to(z), z[unknowns.size - unknowns.own :]])


def _labels(seen: Sequence[Observation], owner: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return the known targets as rows (P, N, K), or None where they are to be found."""
    known = [s.labels.cpu() for s in seen if s.labels is not None]
    if not known:
        return None
    for s, y in zip(seen, known, strict=True):
        if s.loss.targets == "tokens":
            continue  # one for each place
        if s.loss.targets != "classes":
            if y.numel() != s.num_examples * s.num_classes:
                raise AttackError(
                    f"The targets have shape {tuple(y.shape)} and the update is of {s.num_examples} examples with "
                    f"{s.num_classes} numbers each."
                )
        elif y.shape != (s.num_examples,) or bool(((y < 0) | (y >= s.num_classes)).any()):
            raise AttackError(
                f"The labels {y.tolist()} do not fit an update of {s.num_examples} examples and {s.num_classes} "
                "classes. Give one class number per example, or None."
            )
    first = seen[0]
    return torch.stack([first.loss.rows(y, first.num_classes) for y in known])[owner].to(device, dtype)


def _choose(
    seen: Observation,
    unknowns: Unknowns,
    solution: Solution,
    residuals: Tensor,
    limit: Tensor,
    energy: Tensor | None,
    stopping: Stopping,
    image: int,
) -> Reconstruction:
    """Return the start of this image with the lowest objective, clamped to the data range."""
    mine = (stopping.owner == image).nonzero()[:, 0].to(solution.best.device)
    values = solution.values[mine]
    usable = values.isfinite() & residuals[mine].isfinite()
    at = mine[values.masked_fill(~usable, torch.inf).argmin()]
    low, high = seen.bounds
    x, free = unknowns.split(solution.best[at : at + 1])
    finite = bool(usable.any())
    inputs = x[0].clamp(low, high) if finite else torch.full_like(x[0], (low + high) / 2)
    labels = seen.loss.found(free[0]) if seen.labels is None else seen.labels
    relative = residuals[at] if energy is None else residuals[at] / energy[at].clamp_min(torch.finfo(energy.dtype).tiny)
    details = {
        "iterations": float(solution.iterations[at]),
        "evaluations": float(solution.evaluations[at]),
        "starts": float(len(mine) + solution.redraws[mine].sum()),
        "finite_starts": float(usable.sum()),
        "relative_residual": float(relative),
        "stalled": float(stopping.stalled[at.cpu()]),
    }
    details |= {f"own_{i}": float(v) for i, v in enumerate(solution.best[at, unknowns.size - unknowns.own :])}
    converged = finite and bool(residuals[at] <= limit[at])
    if not converged and bool(solution.late[mine].any()):
        details["out_of_time"] = 1.0
    return Reconstruction(
        inputs, labels, float(solution.values[at]), converged, details, x[0].clone() if finite else None
    )
