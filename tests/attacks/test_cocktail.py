"""Unmixing a large batch by independent components: near where it is to be, and honest where it is not."""

import pytest
import torch
from torch import Tensor, nn

from attacks.helpers_attacks import network, noisy, observe, rng
from gradveil.attacks.cocktail import Cocktail
from gradveil.errors import AttackError
from gradveil.types import Batch


def pictures(count: int, seed: int = 1) -> Batch:
    """Boxes of several greys: their differences are few."""
    draw = rng(seed)
    x = torch.zeros(count, 1, 16, 16)
    for picture in x[:, 0]:
        for _ in range(4):
            top, left = torch.randint(12, (2,), generator=draw).tolist()
            high, wide = torch.randint(2, 6, (2,), generator=draw).tolist()
            picture[top : top + high, left : left + wide] = torch.rand((), generator=draw)
    return Batch(x, torch.randint(5, (count,), generator=draw))


def errors(truth: Tensor, found: Tensor) -> Tensor:
    """Return the mean squared error of each image by the nearest of those found."""
    return (torch.cdist(truth.flatten(1), found.flatten(1)).square() / truth[0].numel()).min(1).values


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Sigmoid()])
def test_images_come_out_whatever_lies_behind(activation: nn.Module) -> None:
    data = pictures(16)
    found = Cocktail().reconstruct(observe(network(256, activation), data), rng())
    assert found.converged
    far = errors(data.inputs, found.inputs)
    assert (far < 5e-3).float().mean() > 0.9
    assert found.labels is not None
    where = torch.cdist(data.inputs.flatten(1), found.inputs.flatten(1)).argmin(1)
    assert (found.labels[where] == data.labels)[far < 5e-3].float().mean() > 0.9


def test_rows_without_neighbours_are_unmixed_by_their_entries() -> None:
    draw = rng(3)
    x = torch.rand(6, 1000, generator=draw) * (torch.rand(6, 1000, generator=draw) < 0.1)  # far from Gaussian
    model = network(1000, nn.ReLU(), width=32)
    seen = observe(model, Batch(x, torch.arange(6) % 5))
    found = Cocktail().reconstruct(seen, rng())
    assert (errors(x, found.inputs) < 0.1 * x.var()).all()


def test_the_order_of_a_batch_does_not_matter() -> None:
    model, data = network(256, nn.ReLU()), pictures(8)
    other = Batch(data.inputs.flip(0), data.labels.flip(0))
    first, second = (Cocktail().reconstruct(observe(model, d), rng()).inputs for d in (data, other))
    assert errors(first, second).max() < 1e-3


@pytest.mark.parametrize("spoiled", ["noise", "steps"])
def test_it_says_so_where_it_fails(spoiled: str) -> None:
    seen = observe(network(256, nn.ReLU()), pictures(16))
    seen = noisy(seen, 1.0) if spoiled == "noise" else seen
    found = Cocktail(steps=1 if spoiled == "steps" else 300).reconstruct(seen, rng())
    assert not found.converged
    assert found.inputs.isfinite().all()


def test_it_refuses_a_batch_as_large_as_the_layer() -> None:
    with pytest.raises(AttackError, match="fewer examples"):
        Cocktail().reconstruct(observe(network(256, nn.ReLU(), width=8), pictures(8)), rng())
