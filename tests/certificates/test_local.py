"""The paper's figure: the Jacobian's operator norm, exactly where it can be, by Lanczos where it must."""

from math import inf

import pytest
import torch
from torch import nn

from certificates.random_networks import pairs, random_network
from gradveil.representation.certify import certify
from gradveil.types import Batch


def test_the_norms_are_those_of_the_dense_jacobian() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        model, shape = random_network(rng)
        x, other = pairs(model, shape, 4, rng)
        model, x = model.double(), x.double()
        dense = torch.func.vmap(torch.func.jacrev(lambda z, f=model[:-1]: f(z[None])[0].flatten()))(x).flatten(2)
        r = model[:-1](x).flatten(1).detach()
        target = model[:-1](other.double()).flatten(1).detach()
        for p in (1, 2, inf):
            found = certify(model, None, x, target, p, "local")
            expected = torch.linalg.matrix_norm(dense, p)
            torch.testing.assert_close(found.details["norm"], expected, rtol=5e-3, atol=1e-9)
            distance = torch.linalg.vector_norm(r - target, p, dim=1)
            torch.testing.assert_close(found.bound, distance / expected, rtol=5e-3, atol=1e-9)


def test_lanczos_never_overstates_the_norm_and_reports_its_residual(model: nn.Module, batch: Batch) -> None:
    target = torch.zeros(3, 64)
    found = certify(model, None, batch.inputs, target, 2, "local")
    dense = torch.func.vmap(torch.func.jacrev(lambda z: model[:-1](z[None])[0]))(batch.inputs).flatten(2)
    true = torch.linalg.matrix_norm(dense.double(), 2)
    assert (found.details["norm"] <= true * (1 + 1e-5)).all()
    assert (found.details["norm"] >= true * 0.999).all()
    assert (found.details["residual"] < 1e-2).all()
    assert "Lanczos" in found.how
    assert "from below" in found.how


@pytest.mark.parametrize("p", [1, 2, inf])
def test_an_example_has_the_same_figure_alone_and_in_company(p: float, model: nn.Module, batch: Batch) -> None:
    target = torch.zeros(3, 64)
    together = certify(model, None, batch.inputs, target, p, "local").bound
    alone = [certify(model, None, batch.inputs[i : i + 1], target[i : i + 1], p, "local").bound for i in range(3)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=5e-3, atol=0)


def test_a_representation_that_does_not_move_gives_infinity_and_an_unchanged_one_zero() -> None:
    dead = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    dead[1].weight.data.fill_(-1.0)
    dead[1].bias.data.fill_(-1.0)
    x = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    for p in (1, 2, inf):
        assert certify(dead, None, x, target, p, "local").bound.tolist() == [0.0, inf]
