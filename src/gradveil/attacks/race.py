"""Which starts go on: stop an image once a start has matched, drop what has stalled, redraw what has died."""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradveil.attacks.engine import Verdict, View


@dataclass
class Race:
    """The starts of each image run side by side and are judged by their own objective alone.

    An image is done once one of its starts reaches its goal. A start leaves when its value fell by less than
    ``progress`` (as a share) over the last ``patience`` ticks, when no step improves it any more, or when, at
    one of the ``cuts``, it is not among the better half of its image's starts. A dead one (no finite value)
    starts anew.
    """

    owner: Tensor  # (P,) which image a start belongs to
    goal: Tensor  # (P,) value at which a start has matched
    patience: int
    progress: float = 0.01
    cuts: tuple[int, ...] = ()  # ticks at which the slower half of an image's starts is dropped
    stalled: Tensor = field(init=False)  # (P,) bool: left for lack of progress
    _past: deque[tuple[int, Tensor]] = field(init=False, default_factory=deque)
    _cut: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.stalled = torch.zeros(len(self.owner), dtype=torch.bool)

    def __call__(self, view: View) -> Verdict:
        """Judge the problems that are still running."""
        owner = self.owner[view.rows]
        matched = view.values <= self.goal[view.rows]
        done = torch.isin(owner, owner[matched])
        still = self._stalled(view) | view.stuck
        self.stalled[view.rows[still & ~matched]] = True
        leave = done | still | self._slower(view, owner)
        return Verdict(leave, view.dead & ~leave)

    def _stalled(self, view: View) -> Tensor:
        values = torch.full((len(self.owner),), torch.inf, dtype=view.values.dtype)
        values[view.rows] = view.values
        self._past.append((view.ticks, values))
        while len(self._past) > 1 and self._past[1][0] <= view.ticks - self.patience:
            self._past.popleft()
        ticks, before = self._past[0]
        if ticks > view.ticks - self.patience:
            return torch.zeros(len(view.rows), dtype=torch.bool)
        then = before[view.rows]
        return then.isfinite() & (view.values > (1 - self.progress) * then)

    def _slower(self, view: View, owner: Tensor) -> Tensor:
        slower = torch.zeros(len(owner), dtype=torch.bool)
        while self._cut < len(self.cuts) and view.ticks >= self.cuts[self._cut]:
            self._cut += 1
            for image in owner.unique().tolist():
                mine = ((owner == image) & ~slower).nonzero()[:, 0]
                order = view.values[mine].nan_to_num(torch.inf).argsort(stable=True)
                slower[mine[order[(len(mine) + 1) // 2 :]]] = True
        return slower
