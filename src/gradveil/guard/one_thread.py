"""A guarded model runs in one thread at a time: passes of two would take each other's examples for their own."""

import threading
from typing import Any

from torch import nn

from gradveil.errors import DefenseError
from gradveil.guard import hooks


class OneThread:
    """A hook before every pass of a model, its own looks at itself included; a copy of it begins anew."""

    def __init__(self) -> None:
        self.on = True  # code that was compiled may keep hooks that are gone
        self._at_work: dict[str, threading.Thread] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with; in the middle of another thread's pass hooks are not where they belong."""
        owner = self._at_work.get("thread")
        if self.on and owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model: it cannot be copied or saved until its pass "
                f"is over. Copy it before the threads start, or let them take turns."
            )
        return {"on": self.on, "_at_work": {}}

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take the model for this thread, or refuse."""
        hooks._call(self._take)

    def _take(self) -> None:
        if not self.on:
            return
        me = threading.current_thread()
        owner = self._at_work.setdefault("thread", me)  # looked up and set at once, whatever other threads do
        if owner is not me and owner.is_alive():
            raise DefenseError(
                f"Thread {owner.name!r} is at work on this guarded model, and {me.name!r} called it as well. Give each "
                f"thread a model and a guard of its own (copy.deepcopy, before they start), or let them take turns."
            )
        self._at_work["thread"] = me

    @property
    def is_mine(self) -> bool:
        """Whether this thread's pass is under way."""
        return self._at_work.get("thread") is threading.current_thread()

    def release(self) -> None:
        """Let others run the model."""
        self._at_work.clear()
