"""How far long work is, and when its time is over.

A loop calls ``step`` with what it has done, and stops at its best point where that says so; who waits for it opens a
``Limit`` around it. Neither knows the other.
"""

import math
import time
from collections.abc import Callable
from contextvars import ContextVar, Token

TELL_EVERY = 0.2  # seconds between two calls of a listener

Tell = Callable[[int, int], None]  # steps done, steps at most
clock = time.monotonic


class OutOfTime(Exception):
    """The time for this piece of work is over, and it has nothing to show without the rest."""


class Limit:
    """Within it (``with``), loops have so many seconds, and no more than the limit around it leaves them."""

    def __init__(self, seconds: float = math.inf, tell: Tell | None = None) -> None:
        outer = _current.get()
        self.end: float = min(clock() + seconds, math.inf if outer is None else outer.end)
        self._tell = tell
        self._told = -math.inf
        self._past = 0.0  # what the finished loops take, run to their end
        self._begun = self._last = 0.0
        self._done = self._total = 0.0
        self._token: Token[Limit | None] | None = None

    def __enter__(self) -> "Limit":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.end - clock()

    @property
    def whole(self) -> float:
        """Seconds that the loops within would take if each went to its last step, by their rates so far."""
        spent = self._last - self._begun
        return self._past + (spent * self._total / self._done if self._done else spent)

    def hear(self, done: float, total: float) -> None:
        """Note how far the loop is."""
        now = clock()
        if done <= 0:
            self._past, self._begun = self.whole, now
        self._last = now
        self._done, self._total = done, total
        if self._tell and self._last - self._told >= TELL_EVERY:
            self._told = self._last
            self._tell(int(done), int(total))

    def within(self, share: float) -> None:
        """Note that a share of the next step is done."""
        self.hear(math.floor(self._done) + min(share, 0.99), self._total)


_current: ContextVar[Limit | None] = ContextVar("limit", default=None)


def step(done: int, total: int) -> bool:
    """Say how many steps of a loop are done, 0 before the first; return whether its time is over."""
    limit = _current.get()
    if limit is None:
        return False
    limit.hear(done, total)
    return limit.left <= 0


def part_of_step(share: float) -> bool:
    """Say how much of a long step is done; return whether its time is over."""
    limit = _current.get()
    if limit is None:
        return False
    limit.within(share)
    return limit.left <= 0


def left() -> float:
    """Return how many seconds are left here; infinity without a limit."""
    limit = _current.get()
    return math.inf if limit is None else limit.left
