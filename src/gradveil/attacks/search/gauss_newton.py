"""The descent: Gauss-Newton steps under a falling floor, with the Jacobian written out or by products with it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import pace
from gradveil.attacks.search.equations import TOGETHER, Equations, Prior, normal_equations

LOOK = 10  # iterations between looks at whether all are done, on a GPU, where each makes the host wait


def conjugate_gradients(
    product: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    iterations: int,
    tolerance: float,
) -> Tensor:
    """Solve A s = right (B, n) for symmetric positive A, every problem with its own step lengths.

    Where the time is over (see ``pace``), as far as it came.
    """
    z = precondition(right)
    rz = (right * z).sum(1)
    state = [torch.zeros_like(right), right.clone(), z.clone(), rz]  # s, r, p, r z
    enough = tolerance**2 * rz

    def iterate() -> None:
        s, r, p, rz = state
        live = rz > enough
        ap = product(p)
        length = (rz / (p * ap).sum(1)).masked_fill(~live, 0.0)[:, None]
        s.addcmul_(length, p)
        r.addcmul_(length, ap, value=-1)
        z = precondition(r)
        fresh = (r * z).sum(1)
        p.mul_((fresh / rz).masked_fill(~live, 0.0)[:, None]).add_(z)
        rz.copy_(torch.where(live, fresh, rz))

    step = captured(iterate, state) if right.is_cuda and iterations > LOOK else iterate
    for k in range(iterations):
        if k % (LOOK if right.is_cuda else 1) == 0 and not bool((state[3] > enough).any()):
            break
        step()
        if pace.part_of_step((k + 1) / iterations):
            break
    return state[0]


def captured(change: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], object]:
    """Return what changes the state in place as a CUDA graph, or as it is where it cannot be captured."""
    before = [value.clone() for value in state]
    change()  # settles what torch sets up on first use
    for value, old in zip(state, before, strict=True):
        value.copy_(old)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            change()
    except RuntimeError:
        return change
    return graph.replay


@dataclass(frozen=True)
class DenseStep:
    """Solve (Kᵀ V⁻¹ K + damping · Σ⁻¹) Δ = -slope with K of every problem written out."""

    prior: Prior

    def __call__(
        self, rows: Equations, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
    ) -> Callable[[Tensor], Tensor]:
        """Return damping (B,) -> step (B, n); ``weights`` (B, R) are those of the squared residuals."""
        precision = self.prior.precision()
        normal, slope = [], []
        for part in torch.arange(len(x), device=x.device).split(max(1, TOGETHER // x.shape[1])):
            h, g = normal_equations(rows.take(part), x[part], residual[part], weights[part], width[part])
            normal.append(h)
            slope.append(g)
        fall = torch.cat(slope) + self.prior.precise(x - self.prior.center())
        hessian = torch.cat(normal)

        def step(damping: Tensor) -> Tensor:
            factor, _ = torch.linalg.cholesky_ex(hessian + damping[:, None, None] * precision)
            return torch.cholesky_solve(-fall[..., None], factor)[..., 0]

        return step


@dataclass(frozen=True)
class MatrixFree:
    """The same by conjugate gradients, preconditioned by Σ, on products with K and Kᵀ."""

    prior: Prior
    iterations: int
    tolerance: float = 1e-3  # of the residual of the linear system

    def __call__(
        self, rows: Equations, x: Tensor, residual: Tensor, weights: Tensor, width: Tensor
    ) -> Callable[[Tensor], Tensor]:
        fall = rows.pull(x, weights * residual, width) + self.prior.precise(x - self.prior.center())
        curved = rows.curvature(x, weights, width)

        def step(damping: Tensor) -> Tensor:
            def product(v: Tensor) -> Tensor:
                return curved(v) + damping[:, None] * self.prior.precise(v)

            return conjugate_gradients(product, -fall, self.prior.covary, self.iterations, self.tolerance)

        return step


TRIALS = 6  # dampings tried before a step counts as failed
DROWNED = 0.1  # of the known noise: a floor below it changes nothing any more
WIDEST = 0.3  # of the kinks' rounding, in units of the spread of their input


@dataclass(frozen=True)
class Descent:
    """How the floor falls, and when to stop."""

    steps: int  # in all, at most
    stage_steps: int = 5  # at one floor, at most
    first: float = 3.0  # floor, relative to the root mean square of each tensor
    last: float = 1e-5
    tolerance: float = 0.05  # a stage ends when a step gains less, relatively
    slowest: float = 3.0  # by which the floor is divided between stages, at least
    fastest: float = 30.0  # and at most


@dataclass
class State:
    """Where each of B problems stands."""

    x: Tensor  # (B, n)
    floor: Tensor  # (B,)
    age: Tensor  # (B,) steps at this floor
    steps: Tensor  # (B,)
    best: Tensor  # (B, n), by the objective at the last floor, kinks as they are
    objective: Tensor  # (B,)
    done: Tensor  # (B,)


@dataclass(frozen=True)
class BestStarts:
    """Of each of B problems, the start that ended with the lowest objective."""

    point: Tensor  # (B, n)
    objective: Tensor  # (B,)
    steps: Tensor  # (B,)
    floor: Tensor  # (B,)
    all_steps: Tensor  # (B,) of all starts together
    late: Tensor  # (B,) bool: the time was over before all starts were done


Direction = Callable[[Equations, Tensor, Tensor, Tensor, Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Solver:
    """Solves a group of problems that share a prior."""

    prior: Prior
    schedule: Descent
    direction: Direction  # dense or matrix-free
    entries: slice | Tensor  # which rows are of an update: in these known noise can drown the floor

    def solve(self, rows: Equations, start: Tensor) -> State:
        """Return the final state from ``start`` (B, n)."""
        b = len(start)
        first = self._reached(rows, start, start.new_full((b,), WIDEST)).mul(self.schedule.slowest)
        state = State(
            start.clone(), first.clamp(self.schedule.last, self.schedule.first), start.new_zeros(b), start.new_zeros(b),
            start.clone(), self.objective(rows, start), torch.zeros(b, dtype=torch.bool, device=start.device),
        )  # fmt: skip
        pace.step(0, self.schedule.steps)
        while bool((live := (~state.done).nonzero().flatten()).numel()):
            try:
                self._step(rows.take(live), state, live)
            except pace.OutOfTime:
                break  # in the middle of a step: each stays where it was
            pace.show(lambda: state.x[0].clone())
            if pace.step(int(state.steps.max()), self.schedule.steps):
                live = (~state.done).nonzero().flatten()
                self._keep_better(rows.take(live), state, live)
                break
        return state

    def best(self, rows: Equations, starts: Tensor, together: int | None = None) -> BestStarts:
        """Return the best of each problem's ``starts`` (B, r, n), so many solved together at most."""
        problems, count = torch.arange(len(starts), device=starts.device), starts.shape[1]
        which, all_starts = problems.repeat_interleave(count), starts.flatten(0, 1)
        together = together or len(which)
        parts = [
            self.solve(rows.take(part), start)
            for part, start in zip(which.split(together), all_starts.split(together), strict=True)
        ]
        objective, steps, floor, done = (
            torch.cat([getattr(state, name) for state in parts]).reshape(-1, count)
            for name in ("objective", "steps", "floor", "done")
        )
        pick = (problems, objective.argmin(1))
        point = torch.cat([state.best for state in parts]).reshape(starts.shape)[pick]
        return BestStarts(point, objective[pick], steps[pick], floor[pick], steps.sum(1), ~done.all(1))

    def objective(self, rows: Equations, x: Tensor) -> Tensor:
        """Return half the MAP objective per row (B,), at the last floor, with the kinks as they are."""
        residual = rows.residual(x, None)
        value = self._cost(rows, residual, x, self._variance(rows, x.new_full((len(x),), self.schedule.last)))
        return torch.where(value.isfinite(), value / 2 / residual.shape[1], torch.inf)

    def _step(self, rows: Equations, state: State, live: Tensor) -> None:
        x, floor = state.x[live], state.floor[live]
        width = floor.clamp_max(WIDEST)
        residual = rows.residual(x, width)
        variance = self._variance(rows, floor)
        before = self._cost(rows, residual, x, variance)
        solve = self.direction(rows, x, residual, rows.weights / variance, width)
        moved, after = self._try(rows, x, before, variance, width, solve)
        taken = after < before
        state.x[live] = torch.where(taken[:, None], moved, x)
        state.steps[live] += 1
        state.age[live] += 1
        idle = ~taken | (before - after < self.schedule.tolerance * before)
        ended = idle | (state.age[live] >= self.schedule.stage_steps)
        self._end_stage(rows, state, live[ended], ended)
        state.done[live] |= state.steps[live] >= self.schedule.steps

    def _try(
        self,
        rows: Equations,
        x: Tensor,
        before: Tensor,
        variance: Tensor,
        width: Tensor,
        solve: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Raise the damping until the objective falls; a problem that it never falls for stays."""
        damping, moved, after = torch.ones_like(before), x.clone(), before.clone()
        for _ in range(TRIALS):
            trial = x + solve(damping)
            value = self._cost(rows, rows.residual(trial, width), trial, variance)
            better = (value < before) & (after >= before)
            moved, after = torch.where(better[:, None], trial, moved), torch.where(better, value, after)
            if bool((after < before).all()) or pace.left() <= 0:
                break
            damping = torch.where(after < before, damping, 10 * damping)
        return moved, after

    def _end_stage(self, rows: Equations, state: State, index: Tensor, ended: Tensor) -> None:
        """Keep the point if it is the best so far, and lower the floor to what the residual allows."""
        if not len(index):
            return
        rows, x = rows.take(ended), state.x[index]
        self._keep_better(rows, state, index)
        floor = state.floor[index]
        drowned = ((floor[:, None] * rows.rms < DROWNED * rows.noise) | (rows.weights == 0))[:, self.entries]
        state.done[index] |= (floor <= self.schedule.last) | drowned.all(1)
        lowered = self._reached(rows, x, floor.clamp_max(WIDEST)).clamp(
            floor / self.schedule.fastest, floor / self.schedule.slowest
        )
        state.floor[index] = lowered.clamp_min(self.schedule.last)
        state.age[index] = 0

    def _keep_better(self, rows: Equations, state: State, index: Tensor) -> None:
        if not len(index):
            return
        x = state.x[index]
        objective = self.objective(rows, x)
        better = objective < state.objective[index]
        state.best[index] = torch.where(better[:, None], x, state.best[index])
        state.objective[index] = torch.minimum(objective, state.objective[index])

    def _reached(self, rows: Equations, x: Tensor, width: Tensor) -> Tensor:
        """Return the root mean square (B,) of the residual, relative to each tensor's own and the known noise."""
        relative = rows.residual(x, width).square() / (rows.rms.square() + rows.noise.square()) * rows.weights
        return relative.sum(1).div(rows.weights.sum(1)).sqrt()

    def _variance(self, rows: Equations, floor: Tensor) -> Tensor:
        return rows.noise.square() + (floor[:, None] * rows.rms).square()  # (B, R)

    def _cost(self, rows: Equations, residual: Tensor, x: Tensor, variance: Tensor) -> Tensor:
        away = x - self.prior.center()
        surprise = (away * self.prior.precise(away)).sum(1)
        return (rows.weights * residual.square() / variance).sum(1) + surprise
