"""Stacked clients on CUDA, in a graph and without: equal to one client at a time."""

import pytest
import torch

from federated.helpers_federated import ragged_clients, tiny_dataset, tiny_model
from gradveil.federated.simulate import Training, simulate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def final(engine: str, training: Training, device: str = "cuda") -> dict[str, torch.Tensor]:
    model = tiny_model().double().to(device)
    last = list(simulate(model, tiny_dataset(), ragged_clients(), training, "none", 7, engine=engine))[-1]
    return {name: value.cpu() for name, value in last.model.state_dict().items()}


@pytest.mark.parametrize("engine", ["vectorised", "vectorised:clients=2", "vectorised:graph=false"])
@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": None}, {"weight_decay": 0.1, "proximal": 0.5, "schedule": "inverse:mu=2,gamma=9"}]
)
def test_a_graph_of_stacked_clients_equals_one_at_a_time(engine: str, changes: dict[str, object]) -> None:
    training = Training(**{"rounds": 4, "devices": 4, "epochs": 2, "batch_size": 4, "lr": 0.3, **changes})  # type: ignore[arg-type]
    expected, found = final("sequential", training, "cpu"), final(engine, training)
    assert max(float((expected[n] - found[n]).abs().max()) for n in expected) < 1e-10
