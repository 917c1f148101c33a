"""A leaderboard that takes seconds."""

import pytest

from gradveil_studies.leaderboard import board, entries
from gradveil_studies.leaderboard.entries import Panel

NETWORK = "lenet:activation=relu,init=kaiming,strides=2/2,width=4"
NEWTON = "newton:steps=4"
TINY = Panel("digits", 6, 3, per_class=8, rounds=4, lr=0.2, seeds=2, victims=2, pairs=40, newton=NEWTON, model=NETWORK)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Panel:
    """One data set, few devices and rounds, two learning rates."""
    monkeypatch.setitem(entries.PANELS, "quick", (TINY,))
    monkeypatch.setattr("gradveil_studies.leaderboard.training.MULTIPLES", (1, 4))
    board._place.cache_clear()
    return TINY
