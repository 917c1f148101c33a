"""Accounted noise as certificates: of one update, of what a multi-round server has, of the whole run."""

from math import sqrt

import pytest
import torch

from gradveil.auditing.certificates import promise_rows
from gradveil.auditing.run_folder import Row
from gradveil.data import load
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import build
from gradveil.types import Batch

RUN = PlannedRun(records=20, batch_size=None, epochs=1, rounds=40, participations=4, cohort=5)
PUBLIC = load("digits").test.batch(slice(None))
LABELS = torch.tensor([0, 1, 1])


def rows(spec: str, patient: int = 0, public: Batch = PUBLIC) -> dict[tuple[str, str], Row]:
    """Return the rows by figure and by what they are of."""
    found = promise_rows(spec, build(spec), RUN, public, LABELS, 100, patient)
    return {(row["certificate"], row["layer"]): row for row in found}


def test_floor_and_guess_fall_with_what_the_server_has() -> None:
    found = rows("veil:promise=identification", patient=2)
    floors = [found["floor", what]["mse"] for what in ("one update", "2 updates", "the whole run")]
    guesses = [found["guess", what]["chance"] for what in ("one update", "2 updates", "the whole run")]
    assert floors[0] > floors[1] > floors[2] > 0
    assert 0.01 < guesses[0] < guesses[1] < guesses[2] == pytest.approx(0.0924, abs=1e-3)
    assert "z_run = 1:" in found["floor", "the whole run"]["says"]
    assert found["floor", "one update"]["tiers"] == ["oblivious", "adaptive", "malicious"]
    assert "informed" in found["guess", "one update"]["tiers"]
    assert any("Gaussian-DP for zeroing one record" in text for text in found["floor", "one update"]["assumptions"])
    mean = torch.stack([PUBLIC.inputs[PUBLIC.labels == c].mean(0) for c in (0, 1)])
    blind = [float((PUBLIC.inputs[PUBLIC.labels == c] - mean[c]).square().mean()) for c in (0, 1)]
    assert rows("veil:z=1000")["floor", "one update"]["mse"] == pytest.approx((blind[0] + 2 * blind[1]) / 3, rel=0.05)


def test_the_share_of_a_client_is_not_bound_where_only_the_sum_is() -> None:
    found = rows("veil:z=2,tier=aggregate", patient=2)
    assert {what for _, what in found} == {"the whole run"}
    assert found["floor", "the whole run"]["tiers"] == []
    assert "z_run = 1:" in found["floor", "the whole run"]["says"]  # 2 / sqrt(4)
    assert any("secure aggregation" in text for text in found["floor", "the whole run"]["assumptions"])


def test_where_nothing_is_accounted_nothing_is_promised() -> None:
    assert rows("gaussian:scale=0.1") == {}
    few = Batch(PUBLIC.inputs[:1], PUBLIC.labels[:1])
    assert rows("veil:z=1", public=few)["floor", "one update"]["mse"] is None
    assert rows(f"veil:rho={1 / 2}+gaussian:scale=0.1")["guess", "the whole run"]["chance"] == pytest.approx(
        rows(f"veil:z={sqrt(4)}")["guess", "the whole run"]["chance"]
    )
