"""A guarded model that two threads run at once refuses the second, wherever the first one is in its pass."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from gradveil.errors import DefenseError
from gradveil.protection.protect import guard_of, protect

WAIT = 60.0  # far more than is ever needed


class Stop(nn.Module):
    """A layer that waits in one of its calls."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.there, self.go_on = at, threading.Event(), threading.Event()

    def __deepcopy__(self, memo: object) -> "Stop":
        return Stop(0)

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.there.set()
            assert self.go_on.wait(WAIT)
        return x


@pytest.mark.parametrize("at", [1, 2])  # in the pass itself, and where the defence looks at the model within it
def test_a_second_thread_is_refused_and_the_first_goes_on(at: int) -> None:
    stop = Stop(at)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), stop, nn.ReLU(), nn.Linear(16, 5))
    x, went = torch.rand(4, 1, 8, 8), []
    with protect(model, "representation:share=0.5,method=exact") as guard:

        def first() -> None:
            guard(x).sum().backward()
            went.append(guard.report.steps)

        other = copy.deepcopy(model)  # with a guard of its own
        thread = threading.Thread(target=first, name="first")
        thread.start()
        assert stop.there.wait(WAIT)
        with pytest.raises(DefenseError, match=r"Thread 'first' is at work on this guarded model"):
            guard(x)
        with torch.no_grad(), pytest.raises(DefenseError, match="of its own"):
            guard(x)
        with pytest.raises(DefenseError, match=r"Thread 'first' .* cannot be copied"):
            copy.deepcopy(model)
        other(x).sum().backward()
        stop.go_on.set()
        thread.join(WAIT)
        assert went == [1]
        guard(x).sum().backward()  # its turn
        assert guard.report.steps == 2
        assert guard_of(copy.deepcopy(model)) is not None


def test_a_thread_that_has_ended_holds_nothing() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    guard = protect(model, "gaussian:scale=0.1")
    hook = next(iter(model._forward_pre_hooks.values()))
    thread = threading.Thread(target=hook, args=(model, ()))  # a pass that was broken off without a word
    thread.start()
    thread.join()
    guard(torch.rand(2, 1, 8, 8))
    guard.remove()
    assert not model._forward_pre_hooks
