"""The loop that all optimising attacks share: many problems, one evaluation and one step at a time.

Between blocks of steps the host looks once at the values: finished problems leave, dead ones get a fresh start.
On a GPU a step (evaluation and update together) is captured in a CUDA graph and replayed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gradveil import pace
from gradveil.attacks.search.minimisers import State

WORTH_A_CAPTURE = 0.25  # share of problems that must have left before the rest is captured anew
WARM_UP = 3  # eager steps before a capture, which settle what torch sets up on first use


class Objective(Protocol):
    """What is minimised: P problems of d unknowns."""

    def __call__(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (P,) and gradients (P, d) at point (P, d)."""

    def take(self, rows: Tensor) -> "Objective":
        """Return the problems at these positions."""


class Optimiser(Protocol):
    """How it is minimised; see ``LBFGS`` and ``Adam``."""

    def start(self, z: Tensor) -> State:
        """Return the state of problems that start at z (P, d)."""

    def step(self, state: State, value: Tensor, gradient: Tensor, done: int | None = None) -> State:
        """Return the state after an evaluation at ``point``."""


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
) -> Solution:
    """Run all problems from start (P, d) for at most ``steps`` evaluations each.

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
    pace.step(0, steps)
    while done < steps and len(rows):
        for k in range(done, min(done + every, steps)):
            run.step(k)
            done = k + 1
            pace.show(run.leading)
            if late := pace.step(done, steps):
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
        """Put fresh problems in the place of others, without moving any tensor."""
        for n, value in self.state.items():
            value.index_copy_(0, rows, fresh[n])

    def take(self, objective: Objective, rows: Tensor, places: Tensor) -> "Stepper":
        """Return a stepper of the problems that stay: ``rows`` of all, at these places here."""
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
        """Judge the problems that are still running."""
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
