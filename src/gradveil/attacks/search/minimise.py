"""The descent that searches share: L-BFGS and Adam on many problems at once, none waiting for another.

Between blocks of steps the host looks once at the values: finished problems leave, dead ones get a fresh start.
On a GPU a step (evaluation and update together) is captured in a CUDA graph and replayed.

Of L-BFGS, the direction -H g comes from the compact form of Byrd, Nocedal and Schnabel (1994, theorem 2.2),

    H = γ I + [S  γY] [ R⁻ᵀ (D + γ YᵀY) R⁻¹   -R⁻ᵀ ] [ Sᵀ  ]
                      [        -R⁻¹              0  ] [ γYᵀ ],

with S, Y the steps and gradient changes, D the diagonal and R the upper triangle (in order of time) of SᵀY.
Two passes over S and Y are left. Pairs sit in a ring of slots. R⁻¹ is kept instead of R: a new pair adds one
column to it and the oldest drops a row and a column, so no order and no triangular solve is needed.

A step is one evaluation. In L-BFGS each problem accepts its trial point (Armijo, relaxed by the rounding) and takes
a new direction, or it goes less far along the old one; all by ``torch.where``, so that a step never waits for the
host and can sit in a CUDA graph (constants go in by ``masked_fill``: a scalar in ``where`` is copied from the host).
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradveil import pace
from gradveil.step_rule import BETA1, BETA2, EPS

State = dict[str, Tensor]  # name: (P, ...), one row per problem


@dataclass(frozen=True)
class LBFGS:
    """Settings of the optimiser. Without ``search`` it is ``torch.optim.LBFGS`` with its default step."""

    history: int = 100  # pairs kept per problem
    search: bool = True  # Armijo backtracking; otherwise every finite step is taken
    lr: float = 1.0  # first step tried along a direction
    decrease: float = 1e-4  # of the slope, that a step must bring
    tries: int = 20  # shorter steps before the direction is given up

    def start(self, z: Tensor) -> State:
        """Return the state of problems that start at z (P, d)."""
        p, d = z.shape
        m = self.history
        zero, number = z.new_zeros(p), torch.zeros(p, dtype=torch.long, device=z.device)
        return {
            "point": z, "best": z, "best_value": zero + torch.inf, "z": z, "value": zero + torch.inf,
            "gradient": torch.zeros_like(z), "direction": torch.zeros_like(z), "slope": zero, "step": zero,
            "pairs": z.new_zeros(p, m, 2, d), "r_inverse": z.new_zeros(p, m, m), "yy": z.new_zeros(p, m, m),
            "sy": z.new_zeros(p, m), "gamma": zero + 1, "slot": number, "tries": number, "steepest": number == 0,
            "iterations": number, "evaluations": number, "dead": number > 0, "stuck": number > 0,
        }  # fmt: skip

    def step(self, state: State, value: Tensor, gradient: Tensor, done: int | None = None) -> State:
        """Return the state after an evaluation at ``point``: value (P,), gradient (P, d).

        ``done`` steps bound the number of pairs that any problem can have, so that empty slots cost nothing.
        """
        new, old = dict(state), state
        fresh = old["evaluations"] == 0
        finite = (value + torch.linalg.vector_norm(gradient, 1, 1)).isfinite()
        new["evaluations"] = old["evaluations"] + 1
        new["dead"] = old["dead"] | (~finite & (fresh if self.search else True))
        taken = finite & ~new["dead"] & ~old["stuck"]
        taken = taken & (fresh | self._enough(old, value, gradient)) if self.search else taken
        row = taken[:, None]
        new["iterations"] = old["iterations"] + (taken & ~fresh)
        new["z"] = torch.where(row, old["point"], old["z"])
        new["value"] = torch.where(taken, value, old["value"])
        new["gradient"] = torch.where(row, gradient, old["gradient"])
        better = new["value"] < old["best_value"]
        new["best_value"] = torch.where(better, new["value"], old["best_value"])
        new["best"] = torch.where(better[:, None], new["z"], old["best"])

        s = (old["step"][:, None] * old["direction"]).masked_fill(~row, 0.0)
        direction = self._direction(new, s, new["gradient"] - old["gradient"], done)
        self._turn(new, old, taken, fresh, direction)
        if self.search:
            self._shorten(new, old, ~taken & ~new["dead"], value)
        halt = new["dead"] | new["stuck"]
        new["point"] = new["z"] + (new["step"][:, None] * new["direction"]).masked_fill(halt[:, None], 0.0)
        return new

    def _enough(self, old: State, value: Tensor, gradient: Tensor) -> Tensor:
        """Whether a trial is good enough (P,): Armijo, or the slope says so where values drown in rounding.

        The second is the approximate Wolfe condition of Hager and Zhang (2005).
        """
        armijo: Tensor = value <= old["value"] + self.decrease * old["step"] * old["slope"]
        same = value <= old["value"] + torch.finfo(value.dtype).eps ** 0.5 * old["value"].abs()
        slope: Tensor = torch.linalg.vecdot(gradient, old["direction"])
        by_slope: Tensor = same & (slope <= (2 * self.decrease - 1) * old["slope"])
        return armijo | by_slope

    def _direction(self, new: State, s: Tensor, y: Tensor, done: int | None) -> Tensor:
        """Store the pair (s, y) where its curvature is positive, and return -H g (P, d)."""
        p = len(s)
        used = self.history if done is None else min(self.history, max(done, 1))
        ys = torch.linalg.vecdot(y, s)
        tiny = 10 * torch.finfo(ys.dtype).eps
        push = ys.isfinite() & (ys > tiny * torch.linalg.vecdot(y, y).sqrt() * torch.linalg.vecdot(s, s).sqrt())
        rows, slot = torch.arange(p, device=s.device), new["slot"]
        pairs = new["pairs"]
        pairs[rows, slot] = torch.where(push[:, None, None], torch.stack((s, y), 1), pairs[rows, slot])
        flat = pairs[:, :used].flatten(1, 2)  # (P, 2 used, d)
        product = torch.bmm(torch.stack((new["gradient"], y), 1), flat.mT).view(p, 2, used, 2)  # (P, g|y, used, s|y)
        sg, yg, s_y, y_y = product[:, 0, :, 0], product[:, 0, :, 1], product[:, 1, :, 0], product[:, 1, :, 1]
        at = (torch.arange(used, device=s.device) == slot[:, None]) & push[:, None]  # (P, used)
        safe = ys.masked_fill(~push, 1.0)[:, None]

        r_inverse, yy = new["r_inverse"][:, :used, :used], new["yy"][:, :used, :used]
        column = torch.where(at, 1.0 / safe, -_times(r_inverse, s_y.masked_fill(at, 0.0)) / safe)
        keep = ~push[:, None]
        r_inverse[rows, slot] = r_inverse[rows, slot].masked_fill(~keep, 0.0)
        r_inverse[rows, :, slot] = torch.where(keep, r_inverse[rows, :, slot], column)
        yy[rows, slot] = yy[rows, :, slot] = torch.where(keep, yy[rows, slot], y_y)
        sy = new["sy"][:, :used] = torch.where(at, ys[:, None], new["sy"][:, :used])
        gamma = torch.where(push, ys / torch.linalg.vecdot(y, y), new["gamma"])
        new["gamma"], new["slot"] = gamma, torch.where(push, (slot + 1) % self.history, slot)

        u = _times(r_inverse, sg)
        top = _times(r_inverse.mT, sy * u + gamma[:, None] * (_times(yy, u) - yg))
        weights = torch.stack((top, -gamma[:, None] * u), 2).view(p, 1, 2 * used)
        return -torch.baddbmm(new["gradient"][:, None] * gamma[:, None, None], weights, flat)[:, 0]

    def _turn(self, new: State, old: State, taken: Tensor, fresh: Tensor, direction: Tensor) -> None:
        """Take the new direction where the trial was accepted, and the steepest where no other is left to try."""
        g = new["gradient"]
        slope = torch.linalg.vecdot(g, direction)
        onward = taken & ~fresh & (slope < 0)
        tired = ~taken & (old["tries"] + 1 >= self.tries)
        steep = (taken & ~onward) | (tired & ~old["steepest"])
        new["r_inverse"].mul_(~steep[:, None, None])  # forget the history
        new["gamma"] = new["gamma"].masked_fill(steep, 1.0)
        new["direction"] = torch.where(steep[:, None], -g, torch.where(onward[:, None], direction, old["direction"]))
        squared, length = torch.linalg.vecdot(g, g), torch.linalg.vector_norm(g, 1, 1)
        new["slope"] = torch.where(steep, -squared, torch.where(onward, slope, old["slope"]))
        first = self.lr * (1 / length).clamp(max=1.0)
        new["step"] = torch.where(steep, first, old["step"].masked_fill(onward, self.lr))
        new["steepest"] = steep | (old["steepest"] & ~onward)
        new["tries"] = (old["tries"] + 1).masked_fill(taken | steep, 0)
        stuck = old["stuck"] | (tired & old["steepest"]) | (steep & ~(squared > 0))
        new["stuck"] = stuck & ~new["dead"]

    def _shorten(self, new: State, old: State, rejected: Tensor, value: Tensor) -> None:
        """Shorten the step where a trial was rejected, by quadratic interpolation, to a tenth up to a half."""
        t, slope = old["step"], old["slope"]
        lowest = -slope * t * t / (2 * (value - old["value"] - slope * t))
        shorter = lowest.nan_to_num(0.0, 0.0, 0.0).clamp(0.1 * t, 0.5 * t)
        new["step"] = torch.where(rejected & (new["tries"] > 0), shorter, new["step"])


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the product of (P, m, m) and (P, m)."""
    return torch.bmm(matrix, vector[:, :, None])[:, :, 0]


MILESTONES = (3 / 8, 5 / 8, 7 / 8)  # of the run, where the step shrinks tenfold (Geiping et al. 2020)


@dataclass(frozen=True)
class Adam:
    """Settings of the optimiser (Kingma and Ba 2015); signed gradients and decay as Geiping et al. 2020 have them."""

    steps: int  # of the whole run, which the decay is laid out over
    lr: float = 0.1
    signed: bool = False  # feed the sign of the gradient
    boxed: int = 0  # so many leading coordinates are kept within the bounds
    bounds: tuple[float, float] = (0.0, 1.0)

    def start(self, z: Tensor) -> State:
        zero, number = z.new_zeros(len(z)), torch.zeros(len(z), dtype=torch.long, device=z.device)
        return {
            "point": z, "best": z, "best_value": zero + torch.inf, "first": torch.zeros_like(z),
            "second": torch.zeros_like(z), "iterations": number, "evaluations": number,
            "dead": number > 0, "stuck": number > 0,
        }  # fmt: skip

    def step(self, state: State, value: Tensor, gradient: Tensor, done: int | None = None) -> State:
        new, old = dict(state), state
        finite = (value + torch.linalg.vector_norm(gradient, 1, 1)).isfinite() & ~old["dead"]
        new["dead"] = ~finite
        new["evaluations"] = old["evaluations"] + 1
        better = finite & (value < old["best_value"])
        new["best_value"] = torch.where(better, value, old["best_value"])
        new["best"] = torch.where(better[:, None], old["point"], old["best"])
        g = gradient.masked_fill(~finite[:, None], 0.0)
        g = g.sign() if self.signed else g
        new["first"] = old["first"].lerp(g, 1 - BETA1)
        new["second"] = old["second"] * BETA2 + g * g * (1 - BETA2)
        new["iterations"] = old["iterations"] + finite
        point = old["point"] - self._step(new)
        if self.boxed:
            point[:, : self.boxed].clamp_(*self.bounds)
        new["point"] = torch.where(finite[:, None], point, old["point"])
        return new

    def _step(self, new: State) -> Tensor:
        count = new["iterations"].to(new["first"].dtype)[:, None]
        first = new["first"] / (1 - BETA1**count)
        second = new["second"] / (1 - BETA2**count)
        rate = self.lr * torch.ones_like(count)
        for milestone in MILESTONES:
            rate = torch.where(count > milestone * self.steps, 0.1 * rate, rate)
        return rate * first / (second.sqrt() + EPS)


WORTH_A_CAPTURE = 0.25  # share of problems that must have left before the rest is captured anew
WARM_UP = 3  # eager steps before a capture, which settle what torch sets up on first use


class Objective(Protocol):
    """What is minimised: P problems of d unknowns."""

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]: ...

    def take(self, rows: Tensor) -> "Objective": ...


class Optimiser(Protocol):
    """How it is minimised; see ``LBFGS`` and ``Adam``."""

    def start(self, z: Tensor) -> State: ...

    def step(self, state: State, value: Tensor, gradient: Tensor, done: int | None = None) -> State: ...


@dataclass(frozen=True)
class View:
    """What the host sees between blocks; all on the CPU."""

    steps: int  # done so far
    rows: Tensor  # (A,) which of the P problems are still here
    values: Tensor  # (A,) best so far
    dead: Tensor  # (A,) bool: no finite value to go on from
    stuck: Tensor  # (A,) bool: no step improves


@dataclass(frozen=True)
class Decision:
    """What is to happen with the problems of a view."""

    leave: Tensor  # (A,) bool
    redraw: Tensor  # (A,) bool


@dataclass(frozen=True)
class Solution:
    """Where each problem ended: the best point by its own value."""

    best: Tensor  # (P, d)
    values: Tensor  # (P,)
    iterations: Tensor  # (P,) accepted steps of the last start
    evaluations: Tensor  # (P,) of the last start
    redraws: Tensor  # (P,) fresh starts drawn on the way
    late: Tensor  # (P,) bool: its time was over before it was done


def minimise(
    objective: Objective,
    optimiser: Optimiser,
    start: Tensor,
    steps: int,
    look: Callable[[View], Decision],
    redraw: Callable[[int], Tensor],
    every: int = 50,
    before: int = 0,
    total: int = 0,
) -> Solution:
    """Run all problems from start (P, d) for at most ``steps`` evaluations each.

    ``before`` of ``total`` evaluations were spent on the way to the start: all of them are one piece of work.

    ``look`` decides every so many steps who leaves and who starts anew; ``redraw`` gives problem i's next
    start (d,) from its own generator. A problem's way depends on nothing but itself and what ``look`` says. Where the
    time is over (see ``pace``), each stays at its best point.
    """
    device, p = start.device, len(start)
    number = torch.zeros(p, dtype=torch.long, device=device)
    counts = (number.clone(), number.clone(), number.clone(), number > 0)
    out = Solution(start.clone(), start.new_full((p,), torch.inf), *counts)
    rows, gone = torch.arange(p), torch.zeros(p, dtype=torch.bool)  # of the problems in the state
    run = Stepper(objective, optimiser, optimiser.start(start))
    done, late = 0, False
    total = total or steps
    if not before:
        pace.step(0, total)
    while done < steps and len(rows):
        for k in range(done, min(done + every, steps)):
            run.step(k)
            done = k + 1
            pace.show(run.leading)
            if late := pace.step(before + done, total):
                break
        here = (~gone).nonzero()[:, 0]
        decision = look(View(done, rows[here], *(run.state[n].cpu()[here] for n in ("best_value", "dead", "stuck"))))
        if done >= steps or late:
            _record(out, run.state, rows[here], here)
            out.late[rows[here].to(device)] = (~decision.leave & late).to(device)
            break
        again = here[decision.redraw]
        if len(again):
            fresh = torch.stack([redraw(i) for i in rows[again].tolist()]).to(start)
            run.reset(again.to(device), optimiser.start(fresh))
            out.redraws[rows[again].to(device)] += 1
        left = here[decision.leave]
        if len(left):
            _record(out, run.state, rows[left], left)
            gone[left] = True
            if float(gone.float().mean()) >= (WORTH_A_CAPTURE if run.graphs else 0.0):
                stay = (~gone).nonzero()[:, 0]
                rows, gone = rows[stay], gone[stay]
                run = run.take(objective, rows.to(device), stay.to(device))
    return out


def _record(out: Solution, state: State, rows: Tensor, places: Tensor) -> None:
    """Write down where the problems at these places of the state stand."""
    at, here = rows.to(out.best.device), places.to(out.best.device)
    out.best[at], out.values[at] = state["best"][here], state["best_value"][here]
    out.iterations[at], out.evaluations[at] = state["iterations"][here], state["evaluations"][here]


class Stepper:
    """Holds the state; on a GPU, also the captured graph of one step."""

    def __init__(self, objective: Objective, optimiser: Optimiser, state: State) -> None:
        self.objective, self.optimiser = objective, optimiser
        self.graphs = state["point"].is_cuda
        self.state = {n: v.clone() for n, v in state.items()} if self.graphs else state
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 0

    def step(self, done: int) -> None:
        """Evaluate and step once; ``done`` steps were taken before."""
        if self.graphs and self.graph is None and self.eager >= WARM_UP:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            return
        self.eager += 1
        value, gradient = self.objective(self.state["point"])
        self._keep(self.optimiser.step(self.state, value, gradient, None if self.graphs else done))

    def leading(self) -> Tensor:
        """Return the best point (d,) of the problem with the lowest value."""
        best: Tensor = self.state["best"][self.state["best_value"].argmin()]
        return best

    def reset(self, rows: Tensor, fresh: State) -> None:
        for n, value in self.state.items():
            value.index_copy_(0, rows, fresh[n])

    def take(self, objective: Objective, rows: Tensor, places: Tensor) -> "Stepper":
        state = {n: v.index_select(0, places) for n, v in self.state.items()}
        return Stepper(objective.take(rows), self.optimiser, state)

    def _keep(self, new: State) -> None:
        if not self.graphs:
            self.state = new
            return
        for dtype in {value.dtype for value in self.state.values()}:  # one launch for all of a kind
            names = [n for n, value in self.state.items() if value.dtype == dtype and new[n] is not value]
            torch._foreach_copy_([self.state[n] for n in names], [new[n] for n in names])

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                value, gradient = self.objective(self.state["point"])
                self._keep(self.optimiser.step(self.state, value, gradient))
        except RuntimeError:  # something in the model cannot be captured: go on step by step
            self.graphs = False
            return
        self.graph = graph


@dataclass
class Stopping:
    """The starts of each image run side by side and are judged by their own objective alone.

    An image is done once one of its starts reaches its goal. A start leaves when its value fell by less than
    ``progress`` (as a share) over the last ``patience`` steps, when no step improves it any more, or when, at
    one of the ``cuts``, it is not among the better half of its image's starts. A dead one (no finite value)
    starts anew.
    """

    owner: Tensor  # (P,) which image a start belongs to
    goal: Tensor  # (P,) value at which a start has matched
    patience: int
    progress: float = 0.01
    cuts: tuple[int, ...] = ()  # steps at which the slower half of an image's starts is dropped
    stalled: Tensor = field(init=False)  # (P,) bool: left for lack of progress
    _past: deque[tuple[int, Tensor]] = field(init=False, default_factory=deque)
    _cut: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.stalled = torch.zeros(len(self.owner), dtype=torch.bool)

    def __call__(self, view: View) -> Decision:
        owner = self.owner[view.rows]
        matched = view.values <= self.goal[view.rows]
        done = torch.isin(owner, owner[matched])
        still = self._stalled(view) | view.stuck
        self.stalled[view.rows[still & ~matched]] = True
        leave = done | still | self._slower(view, owner)
        return Decision(leave, view.dead & ~leave)

    def _stalled(self, view: View) -> Tensor:
        values = torch.full((len(self.owner),), torch.inf, dtype=view.values.dtype)
        values[view.rows] = view.values
        self._past.append((view.steps, values))
        while len(self._past) > 1 and self._past[1][0] <= view.steps - self.patience:
            self._past.popleft()
        steps, before = self._past[0]
        if steps > view.steps - self.patience:
            return torch.zeros(len(view.rows), dtype=torch.bool)
        then = before[view.rows]
        return then.isfinite() & (view.values > (1 - self.progress) * then)

    def _slower(self, view: View, owner: Tensor) -> Tensor:
        slower = torch.zeros(len(owner), dtype=torch.bool)
        while self._cut < len(self.cuts) and view.steps >= self.cuts[self._cut]:
            self._cut += 1
            for image in owner.unique().tolist():
                mine = ((owner == image) & ~slower).nonzero()[:, 0]
                order = view.values[mine].nan_to_num(torch.inf).argsort(stable=True)
                slower[mine[order[(len(mine) + 1) // 2 :]]] = True
        return slower
