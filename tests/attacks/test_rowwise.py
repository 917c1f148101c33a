"""Rows that are found one by one in the span of a hidden layer's gradient."""

import pytest
import torch
from torch import Generator

from gradveil.attacks.rowwise import Rowwise
from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import AttackError
from gradveil.federated.settings import Local
from gradveil.models import build
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import Public, observe
from gradveil.types import Batch, Observation


@pytest.fixture(scope="module")
def wine() -> Dataset:
    return load("wine")


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def attacked(
    data: Dataset,
    count: int,
    local: Local | None = None,
    defense: str = "none",
    model: str = "mlp:widths=64/64",
    lr: float = 0.1,
) -> tuple[Observation, Batch]:
    net, held = build(model, data.input_shape, data.num_classes, 0, data.modality), data.train.sample(count, rng(1))
    prior = Public.draw(data, rng(2)).prior
    seen = observe(
        net, held, build_defense(defense), rng(), data.num_classes, prior, lr, local=local, modality=data.modality
    )
    return seen, held


def test_more_rows_than_columns_come_back_to_the_last_digit_with_their_labels(wine: Dataset) -> None:
    seen, held = attacked(wine, 16)
    found = Rowwise().reconstruct(seen, rng(3))
    assert wine.input_shape == (13,)
    assert found.converged
    assert found.objective < 1e-4
    apart = torch.cdist(held.inputs, found.inputs)
    assert float(apart.min(dim=1).values.max()) < 1e-3
    assert found.labels is not None
    assert found.labels[apart.argmin(dim=1)].tolist() == held.labels.tolist()


def test_a_number_to_predict_comes_back_as_well() -> None:
    data = load("diabetes")
    seen, held = attacked(data, 4, Local(batch_size=None, loss="mse"))
    found = Rowwise().reconstruct(seen, rng(3))
    apart = torch.cdist(held.inputs, found.inputs)
    assert float(apart.min(dim=1).values.max()) < 1e-3
    assert found.labels is not None
    assert torch.allclose(found.labels[apart.argmin(dim=1)].float(), held.labels, atol=1e-2)


@pytest.mark.parametrize(
    ("local", "defense"), [(Local(epochs=2, batch_size=2), "none"), (None, "gaussian:scale=1")], ids=["steps", "noise"]
)
def test_a_span_that_is_not_exact_is_refused(wine: Dataset, local: Local | None, defense: str) -> None:
    seen, _ = attacked(wine, 4, local, defense, lr=0.01)
    with pytest.raises(AttackError, match="needs the exact span of one local step"):
        Rowwise(draws=512).reconstruct(seen, rng(3))


def test_a_layer_that_is_too_narrow_is_refused_with_the_number_of_rows_it_shows(wine: Dataset) -> None:
    seen, _ = attacked(wine, 8, model="mlp:widths=16/16")
    with pytest.raises(
        AttackError, match=r"at least 20 inputs and 9 outputs for 8 examples of 13 numbers.* up to 4 ex"
    ):
        Rowwise().reconstruct(seen, rng())
    with pytest.raises(AttackError, match="shows up to 2 examples"):
        Rowwise().reconstruct(seen.only("fc.*"), rng())
