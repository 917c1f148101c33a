"""Stacked clients on CUDA, in a graph and without: equal to one client at a time."""

import pytest
import torch

from federated.helpers_federated import ragged_clients, tiny_dataset, tiny_model
from gradveil.federated.simulate import Training, simulate
from gradveil.models import build
from gradveil.representation.matrices import StackedRows
from gradveil.representation.scores import row_norms
from gradveil.representation.selection import largest_live
from gradveil.tree import parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def final(engine: str, training: Training, device: str = "cuda", defense: str = "none") -> dict[str, torch.Tensor]:
    model = tiny_model().double().to(device)
    last = list(simulate(model, tiny_dataset(), ragged_clients(), training, defense, 7, engine=engine))[-1]
    return {name: value.cpu() for name, value in last.model.state_dict().items()}


@pytest.mark.parametrize("engine", ["vectorised", "vectorised:clients=2", "vectorised:graph=false"])
@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": None}, {"weight_decay": 0.1, "proximal": 0.5, "schedule": "inverse:mu=2,gamma=9"}]
)
def test_a_graph_of_stacked_clients_equals_one_at_a_time(engine: str, changes: dict[str, object]) -> None:
    training = Training(**{"rounds": 4, "clients": 4, "epochs": 2, "batch_size": 4, "lr": 0.3, **changes})  # type: ignore[arg-type]
    expected, found = final("sequential", training, "cpu"), final(engine, training)
    assert max(float((expected[n] - found[n]).abs().max()) for n in expected) < 1e-10


@pytest.mark.parametrize("engine", ["vectorised", "vectorised:clients=2"])
def test_the_papers_defence_in_a_graph_equals_one_at_a_time(engine: str) -> None:
    training = Training(rounds=4, clients=4, epochs=2, batch_size=4, lr=0.3)
    ours = "representation:share=0.4"
    expected, found = final("sequential", training, "cpu", ours), final(engine, training, defense=ours)
    assert max(float((expected[n] - found[n]).abs().max()) for n in expected) < 1e-10


@pytest.mark.parametrize("changes", [{}, {"batch_size": None, "epochs": 1}])
def test_clipped_records_of_stacked_clients_are_those_of_one_at_a_time(changes: dict[str, object]) -> None:
    """With next to no noise: it is drawn where the model is."""
    training = Training(**{"rounds": 4, "clients": 4, "epochs": 2, "batch_size": 4, "lr": 0.3, **changes})  # type: ignore[arg-type]
    veil = "veil:z=1e-12,clip=0.2"
    expected, found = final("sequential", training, "cpu", veil), final("vectorised", training, defense=veil)
    assert max(float((expected[n] - found[n]).abs().max()) for n in expected) < 1e-10


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_rounded_products_choose_nearly_the_same_entries(precision: str) -> None:
    model = build("lenet:activation=relu,init=kaiming", (3, 32, 32), 10).cuda()
    x = torch.rand(1, 16, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    _, exact = row_norms(model, "fc", x[0], "exact")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        rows = StackedRows(model, "fc")({n: p[None] for n, p in parameters(model).items()}, x)
    finally:
        torch.set_float32_matmul_precision(before)
    norms, r = rows.norms[2.0][0], rows.r[0]
    assert float(((norms - exact).abs() / exact)[r != 0].max()) < 1e-2
    chosen, expected = largest_live(r, r / norms, 307), largest_live(r, r / exact, 307)
    assert float((chosen != expected).float().mean()) < 2e-3
