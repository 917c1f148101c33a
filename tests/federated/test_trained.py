"""Clients that train a part of the model send that part, and nothing else moves."""

from pathlib import Path

import pytest
import torch

from gradveil.auditing.train import TrainConfig, train
from gradveil.data import load
from gradveil.errors import ModelError
from gradveil.federated.settings import only_trained
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import client_row, observe
from gradveil.tree import parameters
from gradveil.types import Update

NORMED = "lenet:strides=2/1,width=4,activation=relu,init=kaiming,batchnorm=true"
PARTS = {
    "head": {"fc.weight", "fc.bias"},
    "batch_norm": {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"},
    "conv2.*, fc.bias": {"conv2.weight", "conv2.bias", "fc.bias"},
}


@pytest.mark.parametrize("trains", PARTS)
def test_an_update_holds_what_is_trained_and_the_report_says_so(trains: str) -> None:
    data = load("digits")
    model = only_trained(build(NORMED, data.input_shape, data.num_classes), trains)
    seen = observe(
        model, data.train.batch(slice(0, 4)), build_defense("none"), torch.Generator().manual_seed(0), 10, lr=0.1
    )
    assert set(seen.update.gradient) == PARTS[trains]
    assert all(bool(g.any()) for g in seen.update.gradient.values())
    said = client_row(Update({}), model=model)["schedule"]
    assert all(name in said for name in PARTS[trains])
    assert "are trained and in the update" in said


def test_the_whole_model_needs_no_word() -> None:
    model = build(NORMED, (1, 8, 8), 10)
    assert only_trained(model, "all") is model
    assert len(parameters(model)) == 10
    assert "trained and in" not in client_row(Update({}), model=model)["schedule"]


def test_what_was_frozen_stays_so_and_nothing_left_is_one_line() -> None:
    model = build("mlp:widths=4/4", (3,), 2)
    model.fc1.requires_grad_(False)
    assert set(parameters(only_trained(model, "fc*"))) == {"fc2.weight", "fc2.bias", "fc.weight", "fc.bias"}
    with pytest.raises(ModelError, match=r"trains=fc1.\* leaves nothing of .* to train. Give all, head, batch_norm or"):
        only_trained(model, "fc1.*")
    with pytest.raises(ModelError, match="trains=batch_norm leaves nothing"):
        only_trained(model, "batch_norm")


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_rounds_of_training_move_the_head_alone(engine: str, tmp_path: Path) -> None:
    config = TrainConfig(
        dataset="wine", partition="iid:devices=4", rounds=2, clients=2, trains="head", engine=engine, device="cpu"
    )
    train(config, tmp_path)
    from safetensors.torch import load_file

    data = load("wine")
    after = load_file(tmp_path / "model.safetensors")
    before = dict(build("mlp", data.input_shape, data.num_classes, 0, data.modality).named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[f"model/{name}"])}
    assert moved == {"fc.weight", "fc.bias"}
