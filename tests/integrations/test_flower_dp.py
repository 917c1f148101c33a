"""Flower's own differential privacy, client-side and server-side, around gradveil's mods and grids."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from torch import nn

from gradveil.integrations.flower.checks import checked
from gradveil.integrations.flower.mods import guard_mod
from gradveil.types import Batch
from integrations.flower_parts import LR, Nodes, client_app, context, linear_model

Wrap = Callable[[Any], Any]
CLIP = 0.01


@pytest.mark.parametrize(
    ("mods", "wrap"),
    [
        ([fixedclipping_mod], lambda s: DifferentialPrivacyClientSideFixedClipping(s, 1e-9, CLIP, 2)),
        ([adaptiveclipping_mod], lambda s: DifferentialPrivacyClientSideAdaptiveClipping(s, 1e-9, 2, CLIP)),
        ([], lambda s: DifferentialPrivacyServerSideFixedClipping(s, 1e-9, CLIP, 2)),
        ([LocalDpMod(CLIP, 1e-9, 1.0, 0.1)], lambda s: s),
    ],
    ids=["client fixed", "client adaptive", "server fixed", "local"],
)
def test_clipping_and_the_guard_work_together(batch: Batch, mods: list[Any], wrap: Wrap) -> None:
    model = linear_model()
    apps = [client_app(linear_model, Batch(batch.inputs[[i]], batch.labels[[i]]), [*mods, guarded()]) for i in range(2)]
    grid = checked(Nodes({i: (lambda msg, app=app: app(msg, context())) for i, app in enumerate(apps)}))

    result = wrap(FedAvg(fraction_evaluate=0.0)).start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=1,
        train_config=ConfigRecord({"lr": LR}),
    )

    assert grid.counts == [{"sent": 2, "kept": 2, "failed": 0, "rejected": 0, "silent": 0}]
    assert result.train_metrics_clientapp[1]["defended-steps"] == 1
    change = [result.arrays.to_torch_state_dict()[name] - value for name, value in model.state_dict().items()]
    assert 0 < float(torch.cat([c.flatten() for c in change]).norm()) <= CLIP * 1.01


def guarded() -> Any:
    return guard_mod("representation:share=0.5")


def test_the_clients_would_move_further_without_clipping(batch: Batch) -> None:
    model: nn.Module = linear_model()
    from integrations.flower_parts import message, weights

    out = client_app(lambda: model, batch, [guarded()])(start := message(model), context())
    change = [weights(out)[name] - value for name, value in weights(start).items()]
    assert float(torch.cat([c.flatten() for c in change]).norm()) > 5 * CLIP
