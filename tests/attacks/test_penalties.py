"""Terms on images: hand-made numbers, and one problem's term depends on that problem's group alone."""

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.attacks.search.matching import Energy, GroupConsistency, TotalVariation, batch_norms, statistics_term
from gradveil.tree import parameters
from gradveil.types import Observation, Update


def test_total_variation_of_a_hand_made_image() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 0.5]]).view(1, 1, 1, 2, 2)
    assert TotalVariation(2.0)(x).tolist() == pytest.approx([2 * (0.25 + 0.75)])

    several = TotalVariation(torch.tensor([1.0, 2.0, 3.0]))
    three = torch.cat([x, 2 * x, x])
    assert several(three).tolist() == pytest.approx([1.0, 4.0, 3.0])
    assert several.take(torch.tensor([2, 1]))(three[[2, 1]]).tolist() == pytest.approx([3.0, 4.0])


def test_energy_is_the_mean_square() -> None:
    assert Energy(0.5)(torch.full((2, 1, 4), 2.0)).tolist() == [2.0, 2.0]


def test_a_group_is_pulled_to_its_own_mean_and_to_no_others() -> None:
    term = GroupConsistency(1.0, torch.tensor([0, 0, 1]))
    x = torch.tensor([[1.0], [3.0], [50.0]]).view(3, 1, 1).requires_grad_()
    values = term(x)
    assert values.tolist() == [1.0, 1.0, 0.0]
    assert torch.autograd.grad(values.sum(), x)[0].flatten().tolist() == [-2.0, 2.0, 0.0]
    assert term.take(torch.tensor([2, 0]))(x.detach()[[2, 0]]).tolist() == [0.0, 0.0]


def test_images_with_the_running_statistics_cost_nothing(rng: Generator) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2))
    x = torch.rand(2, 4, 1, 8, 8, generator=rng)
    for norm in batch_norms(model).values():
        norm.momentum = None  # running statistics become those of the one batch seen
    model(x[0])
    seen = [Observation(model, Update(parameters(model)), (1, 8, 8), 2)]

    def term(x: Tensor) -> Tensor:
        (of,) = statistics_term(seen, torch.zeros(len(x), dtype=torch.long), 1.0, running=True)
        return of(x)

    values = term(x)
    torch.testing.assert_close(values[1:], term(x[1:]))  # no problem's statistics leak into another's
    assert float(values[0]) < 1e-6 < 0.01 < float(values[1])
    first = batch_norms(model)["1"]
    assert all(norm.training for norm in batch_norms(model).values())
    assert int(first.num_batches_tracked) == 1
    with torch.no_grad():
        inputs = model[0](x[1])
        mean, var = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3))
        expected = ((mean - first.running_mean) ** 2 / first.running_var + (var / first.running_var - 1) ** 2).mean()
    model = nn.Sequential(*list(model)[:2])
    seen = [Observation(model, Update(parameters(model)), (1, 8, 8), 2)]
    assert float(term(x)[1]) == pytest.approx(float(expected), rel=1e-4)
    assert statistics_term(seen, torch.zeros(1, dtype=torch.long), 1.0) == ()  # the client sent none


def test_a_model_without_batch_norm_has_no_such_layers(model: nn.Module) -> None:
    assert list(batch_norms(model)) == []
