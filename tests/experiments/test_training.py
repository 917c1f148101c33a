from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gradveil.data import load
from gradveil.experiments.looks import first_look, last_looks
from gradveil.experiments.run_folder import RunFolder
from gradveil.experiments.scene import AuditConfig, build_scene, is_small, one_thread
from gradveil.federated.simulate import simulate
from gradveil.models import build


def test_the_last_round_is_looked_at_with_the_weights_its_clients_received(tmp_path: Path, small: AuditConfig) -> None:
    """Not those after it: an update belongs to the weights it started from."""
    data = load("digits")
    model = build("logistic", data.input_shape, data.num_classes)
    scene = build_scene(replace(small, rounds=3), data, model, {}, {})
    with RunFolder.start(tmp_path / "run", small) as folder:
        looks = [first_look(scene), *last_looks(scene, folder, lambda *_: None)]
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
