"""Many models at once: each one's norms are those that it has alone."""

import pytest
import torch
from torch import Tensor, nn

from gradveil.models import build
from gradveil.representation.matrices import StackedRows
from gradveil.representation.scores import row_norms
from gradveil.representation.selection import largest_live, largest_live_each
from gradveil.tree import parameters

NETWORKS = {
    "one convolution": ("lenet:strides=2", (2, 12, 12)),
    "two": ("lenet:strides=2/1,activation=tanh", (1, 8, 8)),
    "three": ("lenet:strides=2/1/1,padding=1", (2, 11, 11)),
    "the paper's four": ("lenet", (1, 28, 28)),
    "dead units": ("lenet:activation=relu,init=kaiming", (3, 16, 16)),
}


def stacked(models: list[nn.Module]) -> dict[str, Tensor]:
    return {name: torch.stack([parameters(m)[name] for m in models]) for name in parameters(models[0])}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("at_once", [1, 1000])
def test_each_models_norms_are_those_it_has_alone(network: str, at_once: int) -> None:
    spec, shape = NETWORKS[network]
    models = [build(spec, shape, 10, seed=seed).double() for seed in range(3)]
    x = torch.rand(3, 2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = StackedRows(models[0], "fc", at_once)(stacked(models), x)
    for k, model in enumerate(models):
        r, norms = row_norms(model, "fc", x[k], "exact")
        torch.testing.assert_close(found.r[k], r)
        torch.testing.assert_close(found.norms[2.0][k], norms, rtol=1e-10, atol=1e-14)


def test_half_precision_factors_are_scaled_into_range_and_back() -> None:
    from gradveil.representation.matrices import _scaled

    tiny = torch.tensor([[1e-9, 3e-10], [2e5, -7e5]])
    small, scale = _scaled(tiny, True)
    assert small.dtype == torch.float16
    torch.testing.assert_close(small.float() * scale[:, 0], tiny, rtol=1e-3, atol=0.0)


def test_what_is_no_chain_of_convolutions_is_left_to_others() -> None:
    x = torch.rand(1, 1, 28, 28)
    for spec in ("lenet:batchnorm=true", "leaknet", "logistic"):
        assert StackedRows.of(build(spec, (1, 28, 28), 10), None, x) is None
    assert StackedRows.of(build("lenet", (1, 28, 28), 10), None, x) is not None
    odd = nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2), nn.Flatten(), nn.Linear(1152, 2))
    assert StackedRows.of(odd, None, x) is None


def test_counts_of_their_own_choose_what_one_count_at_a_time_does() -> None:
    rng = torch.Generator().manual_seed(0)
    r = torch.rand(4, 5, 30, generator=rng) * (torch.rand(4, 5, 30, generator=rng) > 0.4)
    scores = torch.randint(0, 6, r.shape, generator=rng).float()  # many ties
    scores[0, 0, 3] = torch.inf
    counts = [0, 4, 11, 30]
    found = largest_live_each(r, scores, torch.tensor(counts).view(-1, 1, 1))
    for k, count in enumerate(counts):
        assert torch.equal(found[k], largest_live(r[k], scores[k], count))
