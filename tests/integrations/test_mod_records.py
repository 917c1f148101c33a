"""Flower's guard mod with a defence of records: the account, and nothing beside the noisy update."""

import copy
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn

from gradveil.errors import BudgetError
from gradveil.federated.client import step_gradient
from gradveil.integrations.flower.mods import guard_mod
from gradveil.privacy.plan import PlannedRun
from gradveil.protection.defense import build
from gradveil.protection.protect import CallbackGuard
from gradveil.types import Batch
from integrations.flower_parts import LR, SIMULATED, context, linear_model, message, reply, train_plainly, weights

SPEC = "veil:z=0.5,clip=0.7"


def talkative(batch: Batch, mods: list[Any], spoil: Any = None) -> ClientApp:
    """A client that also reports its loss, and some words."""
    app = ClientApp(mods=mods)

    @app.train()
    def _(msg: Message, ctx: Context) -> Message:
        model = linear_model()
        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        train_plainly(model, batch)
        state = model.state_dict() if spoil is None else spoil(model)
        out = reply(msg, state, len(batch))
        out.content["metrics"]["train-loss"] = 0.3
        out.content["notes"] = ConfigRecord({"first-label": int(batch.labels[0])})
        return out

    return app


def test_the_update_has_its_noise_and_nothing_else_is_said_of_the_records(batch: Batch) -> None:
    model = linear_model()
    rng = torch.Generator().manual_seed(5)
    want = step_gradient(copy.deepcopy(model), batch, build(SPEC), rng)
    out = talkative(batch, [guard_mod(SPEC, seed=5)])(message(model), context(SIMULATED))
    for name, value in weights(out).items():
        torch.testing.assert_close(value, model.state_dict()[name] - LR * want[name])
    assert dict(out.content["metrics"]) == {"num-examples": len(batch), "num-steps": 1, "defended-steps": 1}
    assert "notes" not in out.content


def best_of_both(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: 2 * value for name, value in model.state_dict().items()}


def test_weights_that_no_guard_saw_are_withheld(batch: Batch) -> None:
    out = talkative(batch, [guard_mod(SPEC)], best_of_both)(message(linear_model()), context())
    assert "not those of the model" in out.error.reason


def test_a_node_pays_for_every_round_and_stops_when_its_budget_is_spent(batch: Batch) -> None:
    run = PlannedRun(len(batch), None, epochs=1, rounds=9, participations=2, cohort=3)
    spec = "veil:promise=identification,clip=1"
    app, node = talkative(batch, [guard_mod(spec, settings={"run": run})]), context({"partition-id": 3})
    answers = [app(message(linear_model()), node) for _ in range(3)]
    assert [answer.has_error() for answer in answers] == [False, False, True]
    assert "the budget is spent. Client 3 has spent" in answers[2].error.reason
    other = context({"partition-id": 4})
    other.state = node.state
    assert "of client 3, not of 4" in app(message(linear_model()), other).error.reason


def test_a_callback_pays_over_its_trainings(batch: Batch) -> None:
    run = PlannedRun(len(batch), None, epochs=1, rounds=9, participations=2, cohort=3)
    guard, model = CallbackGuard("veil:promise=identification,clip=1", run=run), linear_model()
    for _ in range(2):
        guard.start(model)
        train_plainly(model, batch)
        guard.stop()
    before = copy.deepcopy(model.state_dict())
    guard.start(model)
    with pytest.raises(BudgetError):
        train_plainly(model, batch)
    guard.abandon()
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())
