import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import Message
from torch import nn

from gradveil.integrations.flower.mods import guard_mod
from gradveil.types import Batch
from integrations.flower_parts import LR, Halved, client_app, context, gradient, message, reply, weights


def test_the_server_gets_the_defended_update_and_nothing_else(model: nn.Module, batch: Batch) -> None:
    app = client_app(lambda: model, batch, [guard_mod(Halved())])
    before = {n: v.clone() for n, v in model.state_dict().items()}
    expected = gradient(model, batch)

    sent = weights(app(message(model), context()))

    for name, value in sent.items():
        torch.testing.assert_close(value, before[name] - LR * 0.5 * expected[name])


def test_how_much_an_update_changed_is_reported(model: nn.Module, batch: Batch) -> None:
    out = client_app(lambda: model, batch, [guard_mod(Halved())])(message(model), context())
    assert out.content["metrics"]["update-change"] == pytest.approx(0.5)


def test_running_statistics_and_counters_pass_unchanged(batch: Batch) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 5))
    trained = {n: v + 1 for n, v in model.state_dict().items()}

    out = guard_mod(Halved())(message(model), context(), lambda msg, ctx: reply(msg, trained))

    sent = weights(out)
    assert sent.keys() == trained.keys()
    for name in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
        assert torch.equal(sent[name], trained[name])
    torch.testing.assert_close(sent["2.weight"], model.state_dict()["2.weight"] + 0.5)


def test_the_defense_is_read_when_the_message_comes_and_the_site_stands_above_the_run(
    model: nn.Module, batch: Batch
) -> None:
    mod = guard_mod()
    app = client_app(lambda: model, batch, [mod])

    withheld = app(message(model), context())
    assert withheld.has_error()
    assert "No defense is set" in withheld.error.reason

    site, run = {"defense": "gaussian:scale=0.5,on=update"}, {"defense": "gaussian:scale=0.001,on=update"}
    quiet = app(message(model), context(run_config=run)).content["metrics"]["update-change"]
    loud = app(message(model), context(node_config=site, run_config=run)).content["metrics"]["update-change"]
    assert 0 < quiet < 0.1
    assert loud > 0.5


def test_a_defence_that_changes_nothing_is_no_defence(model: nn.Module, batch: Batch) -> None:
    out = client_app(lambda: model, batch, [guard_mod("gaussian:scale=0,on=update")])(message(model), context())
    assert "changes nothing" in out.error.reason


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state | {"5.bias": state["5.bias"] * torch.nan},
        lambda state: {n: v for n, v in state.items() if n != "5.bias"},
        lambda state: state | {"5.bias": state["5.bias"][:2]},
    ],
    ids=["nan", "missing", "shape"],
)
def test_a_malformed_update_is_withheld(model: nn.Module, spoil) -> None:  # type: ignore[no-untyped-def]
    out = guard_mod(Halved())(message(model), context(), lambda msg, ctx: reply(msg, spoil(model.state_dict())))
    assert out.has_error()
    assert "5.bias" in out.error.reason


def test_an_error_of_the_client_and_a_request_to_evaluate_pass_untouched(model: nn.Module, batch: Batch) -> None:
    app = client_app(lambda: model, batch, [guard_mod(Halved())])
    out: Message = app(message(model, kind="evaluate"), context())
    assert out.content["metrics"]["num-examples"] == len(batch)


def test_a_wrong_spec_withholds_the_update_and_says_so(model: nn.Module, batch: Batch) -> None:
    out = client_app(lambda: model, batch, [guard_mod("no_such_defense")])(message(model), context())
    assert out.has_error()
    assert "no_such_defense" in out.error.reason
