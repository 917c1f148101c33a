"""SecAgg+ lives in Flower's older interface; the guard works inside it."""

from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from torch import nn

from gradveil.integrations.flower.mods import guard_mod
from gradveil.types import Batch
from integrations.flower_parts import Nodes, train_plainly


def numbers(model: nn.Module) -> list[Any]:
    return [value.numpy().copy() for value in model.state_dict().values()]


def secure_average(model: nn.Module, batch: Batch, mods: list[Any]) -> list[Any]:
    """One round of three clients that train the model on the same batch; return the new weights."""

    class Client(NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            state = zip(model.state_dict(), map(torch.tensor, parameters), strict=True)
            model.load_state_dict(dict(state))
            train_plainly(model, batch)
            return numbers(model), len(batch), {}

    app = ClientApp(client_fn=lambda context: Client().to_client(), mods=[secaggplus_mod, *mods])
    contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in (1, 2, 3)}
    grid = Nodes({node: (lambda msg, own=own: app(msg, own)) for node, own in contexts.items()})
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=3,
        min_available_clients=3,
        initial_parameters=ndarrays_to_parameters(numbers(model)),
    )
    server = Context(1, 0, {}, RecordDict(), {})
    legacy = LegacyContext(context=server, config=ServerConfig(num_rounds=1), strategy=strategy)
    secure = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=3.0, clipping_range=2.0)
    DefaultWorkflow(fit_workflow=secure)(grid, legacy)
    return [array.numpy() for array in legacy.state.array_records["parameters"].values()]


def test_a_guarded_client_takes_part_in_secure_aggregation(model: nn.Module, batch: Batch) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plainly = secure_average(model, batch, [])
    model.load_state_dict(start)
    guarded = secure_average(model, batch, [guard_mod("representation:share=0.5")])

    at = list(start).index("5.weight")
    before = start["5.weight"].numpy()
    assert np.abs(plainly[at] - before).max() > 1e-3
    assert np.abs(guarded[at] - plainly[at]).max() > 1e-3
    for i, name in enumerate(start):
        if name != "5.weight":  # the defence changes the weight gradient of that layer alone
            np.testing.assert_allclose(guarded[i], plainly[i], atol=1e-5)  # SecAgg+ rounds to a grid
