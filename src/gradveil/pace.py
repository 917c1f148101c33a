"""How far long work is, and when its time is over.

A loop calls ``step`` with what it has done, and stops at its best point where that says so; who waits for it opens a
``Limit`` around it. Neither knows the other.
"""

import math
import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

TELL_EVERY = 0.2  # seconds between two calls of a listener
KEPT_BACK = 0.05  # of a number of minutes, for the end of the last step and for what is drawn after it
LEAST_BACK = 4.0  # seconds, likewise

Tell = Callable[[int, int], None]  # steps done, steps at most
Watch = Callable[[Any], None]  # where a loop stands: the numbers that it looks for, those of the example first
clock = time.monotonic


def seconds_of(minutes: float | None) -> float:
    """Return how long work may take that must have ended after so many minutes."""
    return math.inf if minutes is None else min(60 * minutes * (1 - KEPT_BACK), 60 * minutes - LEAST_BACK)


class OutOfTime(Exception):
    """The time for this piece of work is over, and it has nothing to show without the rest."""


class Limit:
    """Within it (``with``), loops have so many seconds, and no more than the limit around it leaves them.

    ``least``: steps that a loop takes in any case; ``most``: after which it ends, whatever time is left. ``strict``:
    work that has nothing to show before its end is broken off by ``OutOfTime`` (see ``check``). ``watch`` is shown
    where a loop stands after each step.
    """

    def __init__(
        self,
        seconds: float = math.inf,
        tell: Tell | None = None,
        least: int = 1,
        strict: bool = False,
        watch: Watch | None = None,
        most: float = math.inf,
    ) -> None:
        outer = _current.get()
        self.end: float = min(clock() + seconds, math.inf if outer is None else outer.end)
        self.least, self.strict, self.watch, self.most = least, strict, watch, most
        self.steps = 0  # of the last loop, at most
        self._tell, self._told = tell, -math.inf
        self._past = 0.0  # what the finished loops take, run to their end
        self._begun = self._warm = self._last = 0.0  # when a loop began, had done its first step, its last
        self._done = self._first = 0.0
        self._cut: float | None = None  # what the loop takes, if a step was cut short: it says nothing of the rate
        self._token: Token[Limit | None] | None = None

    def __enter__(self) -> "Limit":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def stop(self) -> None:
        """End it now, from whichever thread: loops within stop after the step that they are at."""
        self.end = -math.inf

    @property
    def left(self) -> float:
        return self.end - clock()

    @property
    def done(self) -> int:
        return int(self._done)

    @property
    def whole(self) -> float:
        """Seconds that the loops within would take if each went to its last step, by their rates so far.

        A loop's first step is not counted in its rate, if there are more: it sets things up.
        """
        if not self._done or self._cut is not None:
            return self._past + (self._cut or 0.0)
        since, done = (self._warm, self._first) if self._done > self._first else (self._begun, 0.0)
        rate = (self._last - since) / (self._done - done)
        return self._past + (since - self._begun) + rate * (self.steps - done)

    def hear(self, done: float, total: int) -> None:
        now = clock()
        if done <= 0:
            self._past, self._begun, self._first, self._cut = self.whole, now, 0.0, None
        elif not self._first:
            self._warm, self._first = now, done
        self._last, self._done, self.steps = now, done, total
        if self._tell and now - self._told >= TELL_EVERY:
            self._told = now
            self._tell(int(done), total)

    def within(self, share: float) -> bool:
        """Note that a share of the next step is done; return whether the time is over."""
        self.hear(math.floor(self._done) + min(share, 0.99), self.steps)
        if over := self.left <= 0:
            self._cut = self.whole - self._past
        return over


_current: ContextVar[Limit | None] = ContextVar("limit", default=None)


def step(done: int, total: int) -> bool:
    """Say how many steps of a loop are done, 0 before the first; return whether its time is over."""
    limit = _current.get()
    if limit is None:
        return False
    limit.hear(done, total)
    return done >= min(limit.least, total) and (limit.left <= 0 or limit.most <= done < total)


def show(point: Callable[[], Any]) -> None:
    """Show where a loop stands to who watches; nothing is worked out where nobody does."""
    limit = _current.get()
    if limit is not None and limit.watch is not None:
        limit.watch(point())


def part_of_step(share: float) -> bool:
    """Say how much of a long step is done; return whether its time is over."""
    limit = _current.get()
    if limit is None:
        return False
    return limit.within(share)


def check() -> None:
    """Raise ``OutOfTime`` where the time is over and the limit is strict."""
    limit = _current.get()
    if limit is not None and limit.strict and limit.left <= 0:
        raise OutOfTime


def left() -> float:
    """Return how many seconds are left here; infinity without a limit."""
    limit = _current.get()
    return math.inf if limit is None else limit.left


def as_clock(seconds: float) -> str:
    """Return ``1:02:03``."""
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
