import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from torch import nn

from gradveil.integrations.flower.checks import checked
from gradveil.integrations.flower.records import withhold
from gradveil.tree import Params
from integrations.flower_parts import Nodes, message, reply


def shifted(msg: Message, by: float) -> Params:
    return {n: v + by for n, v in msg.content["arrays"].to_torch_state_dict().items()}


def nodes(model: nn.Module) -> Nodes:
    def odd_shape(msg: Message) -> Message:
        return reply(msg, shifted(msg, 1.0) | {"5.bias": torch.zeros(2)})

    return Nodes(
        {
            1: lambda msg: reply(msg, shifted(msg, 1.0), 1),
            2: lambda msg: reply(msg, shifted(msg, 4.0), 2),
            3: lambda msg: reply(msg, shifted(msg, float("nan")), 100),
            4: odd_shape,
            5: lambda msg: reply(msg, {"other": torch.zeros(1)}),
            6: lambda msg: withhold(msg, "no"),
            7: lambda msg: None,
            8: lambda msg: reply(msg, shifted(msg, 1.0), 0),
        }
    )


def test_bad_replies_are_counted_and_never_averaged(model: nn.Module) -> None:
    grid = checked(nodes(model))
    start = ArrayRecord(model.state_dict())

    result = FedAvg(fraction_evaluate=0.0, min_available_nodes=8).start(grid=grid, initial_arrays=start, num_rounds=2)

    reasons = {"not finite": 1, "malformed": 3}
    assert grid.counts == [{"sent": 8, "kept": 2, "failed": 1, "rejected": 4, "silent": 1, "reasons": reasons}] * 2
    for name, value in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name] + 2 * 3.0)  # (1 * 1 + 2 * 4) / 3, two rounds


def test_replies_that_are_pushed_and_pulled_are_checked_too(model: nn.Module) -> None:
    grid = checked(nodes(model))
    names = grid.push_messages([message(model, node=3), message(model, node=1)])
    replies = list(grid.pull_messages(names))
    assert [r.has_error() for r in replies] == [True, False]
    assert "NaN" in replies[0].error.reason
