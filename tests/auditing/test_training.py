from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from gradveil.auditing.run_folder import MODEL, RunFolder
from gradveil.auditing.train import FIT, TrainConfig, frozen_part, through, train
from gradveil.auditing.work import last_snapshots
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.federated.server import Checkpoint
from gradveil.federated.simulate import public_records, simulate
from gradveil.models import build, fit_to_public
from gradveil.seeds import Seeds
from gradveil.threats.panel import first_snapshot
from gradveil.threats.setup import AuditConfig, build_setup, is_small, one_thread


def test_the_last_round_is_looked_at_with_the_weights_its_clients_received(tmp_path: Path, small: AuditConfig) -> None:
    """Not those after it: an update belongs to the weights it started from."""
    data = load("digits")
    model = build("logistic", data.input_shape, data.num_classes)
    scene = build_setup(replace(small, rounds=3), data, model, {}, {})
    with RunFolder.start(tmp_path / "run", small) as folder:
        looks = [first_snapshot(scene), *last_snapshots(scene, folder, lambda *_: None)]
    assert [(look.round, look.round_number, look.weights) for look in looks] == [
        ("first", 1, "start"),
        ("last", 3, "none"),
    ]
    states = [
        {n: v.clone() for n, v in r.model.state_dict().items()}
        for r in simulate(model, data, scene.clients, scene.config, "none", scene.seeds)
    ]
    received = looks[1].model.state_dict()
    assert all(torch.equal(received[n], states[1][n]) for n in received)
    assert not all(torch.equal(received[n], states[2][n]) for n in received)


@pytest.mark.parametrize(("wanted", "expected"), [(True, [1, 7]), (False, [7])])
def test_the_number_of_threads_is_put_back(monkeypatch: pytest.MonkeyPatch, wanted: bool, expected: list[int]) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    with one_thread(wanted):
        assert asked == expected[:-1]
    assert asked == expected


def test_small_is_few_weights_and_few_numbers() -> None:
    assert is_small(nn.Linear(2, 2), (1, 8, 8))
    assert not is_small(nn.Linear(1000, 1000))
    assert not is_small(nn.Linear(2, 2), (3, 32, 32))


def test_fixed_first_layers_run_once_and_change_nothing(tmp_path: Path) -> None:
    config = TrainConfig(
        model="scatter:dims=8", partition="classes:devices=10,classes=2,per_class=10", clients=3, rounds=2,
        defense="veil:z=0.1,quantile=0.9",
    )  # fmt: skip
    train(config, tmp_path / "run")
    data, seeds = load(config.dataset), Seeds(config.seed)
    clients = partition(data.train.labels, config.partition, seeds("partition"))
    model = build(config.model, data.input_shape, data.num_classes, config.seed)
    fit_to_public(model, data.train.batch(public_records(data, clients, seeds, FIT)).inputs)
    *_, last = simulate(model, data, clients, config, config.defense, seeds)
    saved = Checkpoint.read(tmp_path / "run" / MODEL)
    saved.restore(model)  # all of it: the fixed part as well
    for name, value in last.model.state_dict().items():
        assert torch.allclose(saved.state[name], value, atol=1e-5), name


def test_only_what_comes_before_the_first_trained_layer_is_fixed() -> None:
    chain = nn.Sequential()
    for name, part in {"a": nn.Linear(4, 4), "drop": nn.Dropout(), "b": nn.Linear(4, 4), "c": nn.Linear(4, 2)}.items():
        chain.add_module(name, part)
    assert [len(part) for part in frozen_part(chain)] == [0, 4]  # type: ignore[arg-type]
    chain.get_submodule("a").requires_grad_(False)
    chain.get_submodule("b").requires_grad_(False)
    fixed, rest = frozen_part(chain)
    assert [list(dict(part.named_children())) for part in (fixed, rest)] == [["a"], ["drop", "b", "c"]]
    assert len(frozen_part(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))[0]) == 0  # nothing to save
    own = nn.Bilinear(2, 2, 2)
    assert frozen_part(own)[1] is own


def test_a_record_keeps_its_place_through_fixed_layers() -> None:
    dataset = load("digits")
    fixed = nn.Sequential(build("scatter:dims=5", dataset.input_shape, dataset.num_classes).get_submodule("basis"))
    fixed[0].directions = torch.eye(5, 64)
    passed = through(fixed, dataset, [np.array([900, 7]), np.array([300])])
    for place in (7, 300, 900):
        assert torch.equal(passed.train.batch([place]).inputs, fixed(dataset.train.batch([place]).inputs))
    assert not passed.train.images[0].any()  # not used, not worked out
    assert len(passed.test) == len(dataset.test)


@pytest.mark.parametrize(("spec", "noise"), [("gaussian", "simulated"), ("pruning", None), ("decoy", "simulated")])
def test_rows_of_a_simulation_say_that_its_noise_can_be_drawn_again(
    tmp_path: Path, spec: str, noise: str | None
) -> None:
    partition = "classes:devices=10,classes=2,per_class=10"
    train(TrainConfig(model="logistic", partition=partition, clients=2, rounds=1, defense=spec), tmp_path / "run")
    (row,) = RunFolder.open(tmp_path / "run").rounds
    assert row.get("noise") == noise
