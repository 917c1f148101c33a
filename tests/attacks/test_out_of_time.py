"""A limit of time inside an attack: it stops at its best point and says so; without one nothing changes."""

import pytest
import torch

from gradveil import pace
from gradveil.attacks.base import build
from gradveil.models import build as build_model
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import observe
from gradveil.types import Batch, Observation


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on by a second whenever somebody looks."""
    now = [0.0]

    def look() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(pace, "clock", look)
    return now


def seen() -> Observation:
    model = build_model("lenet:strides=2/1", (1, 8, 8), 10, 0)
    rng = torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([3]))
    return observe(model, batch, build_defense("none"), rng, 10)


ATTACKS = {
    "dlg:steps=1,restarts=2": 20,
    "gs:steps=20": 20,
    "newton:steps=12": 12,
    "newton:dense_limit=1,steps=4,cg_steps=20": 4,
    "fedavg:steps=20": 20,
}


def run(attack: str) -> tuple[torch.Tensor, bool, dict[str, float]]:
    found = build(attack).reconstruct(seen(), torch.Generator().manual_seed(1))
    return found.inputs, found.converged, found.details


@pytest.mark.parametrize(("attack", "steps"), ATTACKS.items())
def test_an_attack_whose_time_is_over_stops_at_its_best_point(attack: str, steps: int, ticks: list[float]) -> None:
    inputs, converged, details = run(attack)
    assert "out_of_time" not in details
    with pace.Limit(1e9):  # enough: the same answer
        again, as_well, same = run(attack)
    assert torch.equal(inputs, again)
    assert (converged, details) == (as_well, same)
    told: list[tuple[int, int]] = []
    with pace.Limit(9, lambda *step: told.append(step)) as limit:
        cut, content, said = run(attack)
    assert said["out_of_time"] == 1
    assert not content
    assert cut.isfinite().all()
    assert not torch.equal(cut, inputs)
    assert told[0][0] == 0
    assert told[-1][1] == steps
    assert ticks[0] - limit.end < 30  # a few looks at the clock after the end, not a whole run


def test_a_limit_knows_what_its_loops_take_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pace, "clock", lambda: now[0])

    def loop(steps: int, total: int, seconds: float) -> None:
        pace.step(0, total)
        for k in range(steps):
            now[0] += seconds
            pace.step(k + 1, total)

    assert not pace.step(1, 2)  # nobody waits
    with pace.Limit(100) as limit:
        loop(2, 10, 3.0)
        assert limit.whole == 30
        now[0] += 5  # between two loops: set-up counts for nothing
        loop(1, 4, 2.0)
        assert limit.whole == 38
        with pace.Limit(1000) as inner:
            assert inner.left == limit.left  # never beyond the limit around it
        assert pace.left() == limit.left == 100 - 6 - 5 - 2
    assert pace.left() == float("inf")


def test_part_of_a_long_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now: list[float] = [0.0]
    monkeypatch.setattr(pace, "clock", lambda: now[0])
    with pace.Limit(10) as limit:
        pace.step(0, 20)
        now[0] = 3.0
        assert not pace.part_of_step(0.5)
        assert limit.whole == pytest.approx(3 / 0.5 * 20)
        now[0] = 11.0
        assert pace.part_of_step(0.9)
