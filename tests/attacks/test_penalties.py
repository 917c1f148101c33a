"""Terms on images: hand-made numbers, and one problem's term depends on that problem alone."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.search.matching import TotalVariation, batch_norms, statistics_term
from gradveil.tree import parameters
from gradveil.types import Observation, Update


def test_total_variation_of_a_hand_made_image() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 0.5]]).view(1, 1, 1, 2, 2)
    assert TotalVariation(2.0)(x).tolist() == pytest.approx([2 * (0.25 + 0.75)])

    several = TotalVariation(torch.tensor([1.0, 2.0, 3.0]))
    three = torch.cat([x, 2 * x, x])
    assert several(three).tolist() == pytest.approx([1.0, 4.0, 3.0])
    assert several.take(torch.tensor([2, 1]))(three[[2, 1]]).tolist() == pytest.approx([3.0, 4.0])


def _seen(model: nn.Module, x: Tensor) -> Observation:
    """Return what a server sees of a client that trained on x, its running statistics with it."""
    for norm in batch_norms(model).values():
        norm.momentum = None  # running statistics become those of the one batch seen
    client = deepcopy(model)
    client(x)
    buffers = {name: value for name, value in client.named_buffers() if "running" in name}
    return Observation(model, Update(parameters(model), len(x), buffers=buffers), (1, 8, 8), 2)


def test_images_with_the_statistics_that_were_sent_cost_nothing(rng: Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    x = torch.rand(2, 4, 1, 8, 8, generator=rng)
    seen = [_seen(model, x[0])]

    def term(x: Tensor) -> Tensor:
        (of,) = statistics_term(seen, torch.zeros(len(x), dtype=torch.long), 1.0)
        return of(x)

    values = term(x)
    torch.testing.assert_close(values[1:], term(x[1:]))  # no problem's statistics leak into another's
    assert float(values[0]) < 1e-6 < 0.01 < float(values[1])
    assert all(norm.training and int(norm.num_batches_tracked) == 0 for norm in batch_norms(model).values())
    with torch.no_grad():
        here, there = (model[0](one) for one in x)
        over = (0, 2, 3)
        mean, var = here.mean(over), here.var(over)
        expected = ((there.mean(over) - mean) ** 2 / var + (there.var(over) / var - 1) ** 2).mean()
    seen = [_seen(nn.Sequential(*list(model)[:2]), x[0])]
    assert float(term(x)[1]) == pytest.approx(float(expected), rel=1e-4)
    seen = [replace(seen[0], update=replace(seen[0].update, buffers={}))]
    assert statistics_term(seen, torch.zeros(1, dtype=torch.long), 1.0) == ()  # the client sent none


def test_a_model_without_batch_norm_has_no_such_layers(model: nn.Module) -> None:
    assert list(batch_norms(model)) == []
