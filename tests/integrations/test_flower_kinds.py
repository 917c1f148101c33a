"""Tables, text and a part of a model on Flower: the same model as in process."""

from pathlib import Path

import pytest

pytest.importorskip("flwr")

import torch

from gradveil.data.known import made_up_patients
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.integrations.flower.app import serve
from gradveil.integrations.flower.settings import FlowerSettings, build_model, load_data
from integrations.test_flower_app import nodes

GPT = "gpt_tiny:width=16,depth=1,heads=2"
KINDS = {
    "rows by hospital": FlowerSettings(
        dataset="table:path=patients.csv,target=outcome,by=hospital", model="mlp:widths=8/8", partition="natural",
        clients=3, rounds=2,
    ),
    "rows by class": FlowerSettings(
        dataset="wine", model="mlp:widths=8/8", partition="dirichlet:devices=4,alpha=0.5", clients=2, rounds=2
    ),
    "a head alone": FlowerSettings(
        dataset="wine", model="mlp:widths=8/8", partition="iid:devices=4", clients=2, rounds=2, trains="head"
    ),
    "next tokens": FlowerSettings(
        dataset="manual:vocabulary=64,length=8", model=GPT, partition="iid:devices=4,per_device=6", clients=2, rounds=1,
        loss="next_token", lr=0.1,
    ),
    "pages": FlowerSettings(
        dataset="manual:task=page,vocabulary=64,length=8", model="bert_tiny:width=16,depth=1,heads=2",
        partition="classes:devices=4,classes=2,per_class=4", clients=2, rounds=1, lr=0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_flower_gives_the_model_that_the_simulation_gives(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = KINDS[kind]
    monkeypatch.chdir(tmp_path)
    table = {name: [str(cell) for cell in column] for name, column in made_up_patients(rows=120).items()}
    Path("patients.csv").write_text("\n".join([",".join(table), *map(",".join, zip(*table.values(), strict=True))]))
    dataset, shares = load_data(settings.dataset, settings.data, settings.partition, settings.seed)
    outcome = serve(nodes(settings, list(range(len(shares)))), settings)
    training = Training(
        rounds=settings.rounds, clients=settings.clients, batch_size=settings.batch_size or None, lr=settings.lr,
        loss=settings.loss,
    )  # fmt: skip
    *_, last = simulate(build_model(settings, dataset), dataset, shares, training, settings.defense, settings.seed)
    expected, start = last.model.state_dict(), build_model(settings, dataset).state_dict()
    assert outcome.state.keys() == expected.keys()
    for name, value in expected.items():
        assert float((outcome.state[name] - value).abs().max()) < 1e-5
    moved = {name for name in expected if not torch.equal(expected[name], start[name])}
    assert moved == ({"fc.weight", "fc.bias"} if kind == "a head alone" else moved)
    assert moved
