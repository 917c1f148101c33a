"""Terms on images: hand-made numbers, and one problem's term depends on that problem's group alone."""

import pytest
import torch
from torch import Generator, nn

from gradveil.attacks.search.matching import BatchNormStatistics, Energy, GroupConsistency, TotalVariation, batch_norms


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
    model(x[0])  # the first batch norm has now seen problem 0's batch
    model.train()
    term = BatchNormStatistics(1.0, model)
    values = term(x)
    torch.testing.assert_close(values[1:], term(x[1:]))  # no problem's statistics leak into another's
    first = next(iter(batch_norms(model).values()))
    assert float(values[0]) < 0.1
    assert float(values[1]) > float(values[0])
    assert all(norm.training for norm in batch_norms(model).values())
    assert int(first.num_batches_tracked) == 1
    with torch.no_grad():
        inputs = model[0](x[1])
        mean, var = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), unbiased=False)
        scale = first.running_var + first.eps
        expected = ((mean - first.running_mean) ** 2 / scale + (var / scale - 1) ** 2).mean()
    alone = nn.Sequential(*list(model)[:2])
    assert float(BatchNormStatistics(1.0, alone)(x)[1]) == pytest.approx(float(expected), rel=1e-4)


def test_a_model_without_batch_norm_has_no_such_layers(model: nn.Module) -> None:
    assert list(batch_norms(model)) == []
