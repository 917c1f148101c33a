"""veil in whole runs: the same numbers on every engine, public data that is nobody's, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from federated.helpers_federated import tiny_dataset, tiny_model
from gradveil.data.partition import undealt
from gradveil.errors import GradveilError
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.tree import Params, parameters
from gradveil_studies.together import Variant, simulate_together

CLIENTS = np.split(np.random.default_rng(1).permutation(60)[:40], [3, 10, 24])  # 20 records are nobody's
STEPS = Training(rounds=2, clients=3, batch_size=4, epochs=2, lr=0.1, weight_decay=0.01)
WHOLE = Training(rounds=2, clients=3, batch_size=None, lr=0.1)
SPECS = [
    ("veil:z=0.5", STEPS),
    ("veil:z=0.3,shape=public,quantile=0.9,rank=6", STEPS),
    ("veil:z=0.2+gaussian:scale=0.01", STEPS),
    ("veil:promise=reconstruction,tier=aggregate,quantile=0.5", WHOLE),
]


def trained(model: nn.Module, spec: str, training: Training, engine: str) -> Params:
    *_, last = simulate(model, tiny_dataset(), CLIENTS, training, spec, 3, engine=engine)
    return parameters(last.model)


@pytest.mark.parametrize(("spec", "training"), SPECS)
def test_stacked_clients_get_the_numbers_of_one_after_the_other(spec: str, training: Training) -> None:
    model = tiny_model().double()
    together, alone = (trained(model, spec, training, engine) for engine in ("vectorised", "sequential"))
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)


def test_worker_processes_get_the_same_numbers() -> None:
    spec, training = SPECS[1]
    found = [trained(tiny_model(), spec, training, engine) for engine in ("processes:workers=2", "sequential")]
    torch.testing.assert_close(*found)


def test_settings_with_and_without_it_train_together() -> None:
    model, specs = tiny_model().double(), ("none", "veil:z=0.5,quantile=0.9", "veil:z=0.3,shape=public,rank=6", "none")
    *_, last = simulate_together([Variant(model, CLIENTS, spec, 3) for spec in specs], tiny_dataset(), WHOLE)
    for spec, one in zip(specs, last, strict=True):
        torch.testing.assert_close(parameters(one.model), trained(model, spec, WHOLE, "sequential"))


def test_public_records_are_those_that_no_device_holds() -> None:
    left = undealt(60, CLIENTS)
    assert len(left) == 20
    assert not set(left) & set(np.concatenate(CLIENTS))


@pytest.mark.parametrize(
    ("spec", "training", "said"),
    [
        ("veil:quantile=0.9", WHOLE, "needs public examples"),
        ("veil:tier=aggregate", STEPS, "single release"),
        ("veil:tier=aggregate", Training(rounds=1, clients=1, batch_size=None), "fewer than two are left"),
    ],
)
def test_a_run_that_cannot_keep_its_promise_is_refused(spec: str, training: Training, said: str) -> None:
    everything = np.array_split(np.arange(60), 4)
    with pytest.raises(GradveilError, match=said):
        next(simulate(tiny_model(), tiny_dataset(), everything, training, spec))


def test_batch_norm_sends_nothing() -> None:
    with pytest.raises(GradveilError, match="batch norm in train mode"):
        next(simulate(tiny_model(batchnorm=True), tiny_dataset(), CLIENTS, WHOLE, "veil"))
