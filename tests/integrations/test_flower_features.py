"""A frozen backbone on Flower: the server fits the directions, each site works its records' features out once."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("flwr")

from flwr.app import Context, RecordDict

from gradveil.auditing.train import FIT
from gradveil.federated.simulate import public_records
from gradveil.integrations.flower.app import make_client_app, serve
from gradveil.integrations.flower.settings import FlowerSettings, load_data
from gradveil.models import build, fit_to_public
from gradveil.models.features import FeatureFiles
from integrations.flower_parts import Nodes

SEEN: list[int] = []


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.conv = nn.Conv2d(1, 30, 3)

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(len(x))
        return self.conv(x).relu()


def test_a_run_on_features_over_flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADVEIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "flower_features", sys.modules[__name__])
    FeatureFiles.of.cache_clear()
    spec = "features:backbone=flower_features:Seen,dims=20,init=zeros"
    settings = FlowerSettings(
        model=spec, dataset="digits", partition="iid:devices=4,per_device=200", rounds=4, clients=4, batch_size=0,
        lr=20.0, defense="veil:epsilon=8,tier=local,clip=0.3",
    )  # fmt: skip
    app = make_client_app(settings, simulation=True)

    def node(device: int):  # type: ignore[no-untyped-def]
        return lambda msg: app(msg, Context(1, 0, {"partition-id": device}, RecordDict(), {}))

    outcome = serve(Nodes({7919 * device + 5: node(device) for device in range(4)}), settings, simulation=True)
    assert outcome.rounds[-1]["accepted"] == 4
    assert outcome.rounds[-1]["accuracy"] > 0.5
    data, shares = load_data("digits", "", settings.partition, 0)
    blanks = len([count for count in SEEN if count == 1])
    assert sum(SEEN) - blanks <= len(data.train) + len(data.test)  # each record once, on every node and the server
    model = build(spec, data.input_shape, 10)
    public = public_records(data, shares, settings.seeds, FIT)
    fit_to_public(model, data.train.batch(public).inputs)
    assert torch.allclose(outcome.state["basis.directions"], model.state_dict()["basis.directions"], atol=1e-5)
    assert list((tmp_path / "cache").rglob("*.safetensors"))
