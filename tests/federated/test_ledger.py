"""Accounts over a run: who is drawn, what is paid, kept in the checkpoint, and rounds that are not released."""

from collections import Counter
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.helpers_federated import Spoiled, ragged_clients, tiny_dataset, tiny_model

from gradveil.errors import BudgetError, GradveilError
from gradveil.federated.server import Checkpoint
from gradveil.federated.settings import Training
from gradveil.federated.simulate import Round, simulate
from gradveil.privacy.accountant import Account

DATA = tiny_dataset()
EVEN = np.split(np.random.default_rng(1).permutation(60), 10)
TRAINING = Training(rounds=10, clients=3, batch_size=None, lr=0.1)


def run(defense: str, training: Training = TRAINING, clients: Any = EVEN, **options: Any) -> list[Round]:
    """Run all rounds of a small training."""
    return list(simulate(tiny_model(), DATA, clients, training, defense, 7, **options))


def weights(done: Round) -> torch.Tensor:
    """Return all weights after a round."""
    return torch.cat([p.detach().flatten() for p in done.model.parameters()])


def test_a_promise_is_kept_exactly_and_clients_take_turns() -> None:
    rounds = run("veil:promise=reconstruction")
    taken = Counter(client for done in rounds for client in done.clients)
    assert set(taken.values()) == {3}  # 10 rounds x 3 of 10 clients
    assert [account.z_run for account in rounds[-1].accounts] == pytest.approx([0.5] * 10)
    assert max(account.spent for account in rounds[0].accounts) == pytest.approx(4 / 3)


def test_without_a_promise_the_draw_is_as_ever_and_the_accounts_count() -> None:
    rounds = run("veil:z=2", replace(TRAINING, epochs=2))
    assert [done.clients for done in rounds] == [done.clients for done in run("none", replace(TRAINING, epochs=2))]
    taken = Counter(client for done in rounds for client in done.clients)
    assert [account.spent for account in rounds[-1].accounts] == [taken[i] * 2 / 2**2 for i in range(10)]
    assert run("none")[-1].accounts == ()


def test_accounts_go_on_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    whole = run("veil:rho=1")
    for done in simulate(tiny_model(), DATA, EVEN, TRAINING, "veil:rho=1", 7):
        if done.number == 4:
            done.checkpoint().save(path)
            break
    after = run("veil:rho=1", resume=Checkpoint.read(path))
    assert [done.clients for done in after] == [done.clients for done in whole[4:]]
    assert after[-1].accounts == whole[-1].accounts
    assert torch.equal(weights(after[-1]), weights(whole[-1]))


def test_a_budget_that_is_spent_refuses_the_round_and_keeps_those_before() -> None:
    rounds = simulate(tiny_model(), DATA, EVEN, TRAINING, "veil:z=2,limit=0.5,tier=aggregate", 7)
    assert [next(rounds).number for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(BudgetError, match=r"Round 7 is refused: .* costs μ² = 0.25, and 2 of 10 clients have that lef"):
        next(rounds)


def test_more_rounds_than_were_planned_are_refused() -> None:
    last = run("veil:promise=identification")[-1]
    with pytest.raises(BudgetError, match=r"Round 11 is refused: .* 0 of 10 clients"):
        run("veil:promise=identification", replace(TRAINING, rounds=20), resume=last.checkpoint())


@pytest.mark.parametrize(
    ("notes", "clients", "defense", "words"),
    [
        ({}, EVEN, "veil:z=1", "no accounts of these 10 clients"),
        ({"accounts": [Account("x").to_json()] * 10}, EVEN, "veil:z=1", "of client x, not of 0-"),
        ({"accounts": [Account("x").to_json()]}, EVEN, "veil:z=1", "no accounts of these 10 clients"),
        (None, EVEN[::-1], "veil:z=1", "not of 0-"),
        (None, EVEN, "none", "this defence promises nothing"),
    ],
)
def test_a_checkpoint_of_other_clients_is_refused(notes: Any, clients: Any, defense: str, words: str) -> None:
    saved = run("veil:z=1", replace(TRAINING, rounds=1))[-1].checkpoint()
    with pytest.raises(BudgetError, match=words):
        run(defense, clients=clients, resume=saved if notes is None else replace(saved, notes=notes))


def test_a_sum_with_too_little_noise_is_not_released_and_counted() -> None:
    start, training = tiny_model(), replace(TRAINING, rounds=8, clients=6)
    before = torch.cat([p.detach().flatten() for p in start.parameters()])
    withheld = 0
    for done in run("veil:z=2,tier=aggregate,lost=0.2", training, engine=Spoiled(nan=0.25)):
        arrived = 6 - done.rejected.get("not finite", 0)
        if arrived < 5:  # 6 x 0.8, rounded up
            assert done.rejected["too little noise"] == arrived
            assert done.accepted == 0
            withheld += 1
        else:
            assert done.accepted == arrived
            assert "too little noise" not in done.rejected
    assert 0 < withheld < 8
    refused = run("veil:z=2,tier=aggregate", replace(training, rounds=1), engine=Spoiled(nan=0.5))[-1]
    assert torch.equal(weights(refused), before)
    assert max(account.mu for account in refused.accounts) == pytest.approx(1 / 2)  # those who sent have paid


def test_the_sum_has_the_noise_that_was_promised() -> None:
    # Clients whose gradients vanish: what is left of the mean of their updates is the noise.
    class Still(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.0 * super().forward(x.flatten(1))

    training = replace(TRAINING, rounds=1, clients=10, lr=1.0)
    start = torch.nn.Sequential(Still(36, 3))
    (done,) = simulate(start, DATA, EVEN, training, "veil:z=4,tier=aggregate,lost=0.19", 7)
    before = torch.cat([p.detach().flatten() for p in start.parameters()])
    moved = weights(done) - before
    assert float(moved.std()) == pytest.approx(4 / sqrt(0.81) / 60, rel=0.2)  # 60 records in the sum


@pytest.mark.parametrize(
    ("defense", "changed", "clients", "words"),
    [
        ("veil:z=1,tier=aggregate", {"batch_size": 2}, EVEN, "takes 3 local steps"),
        ("veil:z=1,tier=aggregate", {"clients": 1}, EVEN, "fewer than two are left"),
        ("veil:z=1,tier=aggregate,cohort=5", {}, EVEN, "counts on 5 clients a round, and 3 take part"),
        ("veil:z=1,tier=aggregate", {"weighting": "uniform"}, ragged_clients(), "count alike"),
        ("veil:z=1,tier=aggregate", {"sampling": "with"}, EVEN, "drawn once a round"),
        ("veil:promise=reconstruction", {"sampling": "with"}, EVEN, "drawn once a round"),
        ("veil:z=0", {}, EVEN, "z=0: give a number above 0"),
    ],
)
def test_what_the_promise_does_not_cover_is_refused(defense: str, changed: Any, clients: Any, words: str) -> None:
    with pytest.raises(GradveilError, match=words):
        run(defense, replace(TRAINING, **changed), clients)
