"""Where memory does not suffice, fewer problems run at once and give the same answers."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradveil.attacks.base import build, peak_bytes
from gradveil.attacks.search.gauss_newton import Solver
from gradveil.attacks.search.matching import MatchingObjective
from gradveil.data.base import Split
from gradveil.errors import AttackError
from gradveil.federated.client import evaluate
from gradveil.models import build as build_model
from gradveil.protection.defense import build as build_defense
from gradveil.threats.panel import oblivious
from gradveil.threats.trial import Trial, attack_rows, attempt, observe
from gradveil.types import Batch, Observation

CPU = RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


@pytest.fixture(scope="module")
def seen() -> list[Observation]:
    model, rng = build_model("lenet:strides=2/1", (1, 8, 8), 10, 0), torch.Generator().manual_seed(0)
    batches = [Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([i])) for i in range(5)]
    return [observe(model, batch, build_defense("none"), rng, 10) for batch in batches]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], None]:
    """Sets how many problems fit into memory at once."""

    def fit(most: int, error: Exception) -> None:
        evaluated, residuals = MatchingObjective.__call__, Solver.objective

        def evaluate(self: Any, point: torch.Tensor) -> Any:
            if len(point) > most:
                raise error
            return evaluated(self, point)

        def residual(self: Any, rows: Any, x: torch.Tensor) -> Any:
            if len(x) > most:
                raise error
            return residuals(self, rows, x)

        monkeypatch.setattr(MatchingObjective, "__call__", evaluate)
        monkeypatch.setattr(Solver, "objective", residual)

    return fit


def rngs(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


@pytest.mark.parametrize("error", [CPU, CUDA])
@pytest.mark.parametrize("attack", ["dlg:steps=1,inner=8,restarts=2", "gs:steps=10", "newton:steps=5"])
def test_half_as_many_go_on_from_the_same_draws(
    attack: str, error: Exception, seen: list[Observation], room: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attacker = build(attack)
    whole = attacker.reconstruct_many(seen, rngs(5))
    room(2, error)
    with caplog.at_level(logging.WARNING, "gradveil"):
        parts = attacker.reconstruct_many(seen, rngs(5))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.inputs, b.inputs, rtol=1e-3, atol=1e-4)
    assert caplog.messages[0] == "out of memory with 5 updates at once: going on with 2"


@pytest.mark.parametrize("attack", ["gs:steps=10", "newton:steps=5"])
def test_one_that_does_not_fit_is_one_line_and_a_skipped_row(attack: str, seen: list[Observation], room: Any) -> None:
    room(0, CUDA)
    with pytest.raises(AttackError, match=r"^One update does not fit into memory"):
        build(attack).reconstruct_many(seen, rngs(5))
    trials = [Trial(s, oblivious(), attack, rng) for s, rng in zip(seen[:2], rngs(2), strict=True)]
    rows, _ = attack_rows(trials, attempt(trials), None)
    assert [row["kind"] for row in rows] == ["skip", "skip"]


def test_other_errors_are_not_taken_for_a_lack_of_memory(seen: list[Observation], room: Any) -> None:
    room(2, RuntimeError("a shape is wrong"))
    with pytest.raises(RuntimeError, match="a shape is wrong"):
        build("gs:steps=10").reconstruct_many(seen, rngs(5))


def test_a_test_goes_on_with_smaller_batches() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 3:
                raise CUDA
            return self.inner(x)

    torch.manual_seed(0)
    model, labels = Narrow(), torch.arange(20) % 3
    split = Split(torch.rand(20, 4).numpy(), labels, scale=1.0)
    assert evaluate(model, split, batch_size=16) == evaluate(model, split, batch_size=2)


def test_the_peak_counts_what_lives_at_once() -> None:
    x = torch.ones(1000)

    def run() -> None:
        a = x + 1  # 4,000 bytes
        b = a * 2  # beside it
        del a
        c = b.reshape(10, 100)  # no bytes of its own
        (c + 1).sum()

    assert 8000 <= peak_bytes(run, torch.device("cpu")) < 8100


@pytest.mark.parametrize(("attack", "most"), [("analytic", 2.6), ("gs:steps=2", 4.6)])
def test_an_update_of_a_large_model_is_not_copied_needlessly(attack: str, most: float) -> None:
    """The model and the update are two; a search makes a trial gradient and its slopes, the closed form looks at the
    first layer alone."""
    layers = nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8192), nn.ReLU(), nn.Linear(8192, 5)
    model, rng = nn.Sequential(nn.Flatten(), *layers), torch.Generator().manual_seed(0)
    batch = Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([3]))
    seen = observe(model, batch, build_defense("none"), rng, 5)
    size = sum(4 * p.numel() for p in model.parameters())
    taken = peak_bytes(lambda: build(attack).reconstruct(seen, rng), torch.device("cpu"))
    assert taken < most * size, taken / size
