"""What a model rounds stays within the stated slack, step by step and over a whole chain."""

from collections.abc import Callable
from math import inf

import pytest
import torch
from torch import nn

from certificates.random_networks import ACTIVATIONS, pairs, random_network
from gradveil.errors import CertificateError
from gradveil.modules import find_layer, representation
from gradveil.representation.certify import certify
from gradveil.representation.intervals import propagate, pull_rounding, unit_rows
from gradveil.representation.norms import Precision, forward_error, norm, operator_norm, slack
from gradveil.representation.problem import step_chain

SINGLE = Precision.exactly(torch.float32)


@pytest.mark.parametrize("module", [*ACTIVATIONS, lambda: nn.Softplus(1.0, 1.0)])
def test_an_activation_in_single_precision_stays_within_its_slack(module: Callable[[], nn.Module]) -> None:
    step = step_chain(nn.Sequential(module(), nn.Linear(2, 2)), None, torch.rand(1, 2)).steps[0]
    rng = torch.Generator().manual_seed(0)
    x = 10 ** (6 * torch.rand(20_000, generator=rng) - 4) * (torch.randint(0, 2, (20_000,), generator=rng) * 2 - 1)
    off = (module()(x).double() - step(x.double())).abs()
    assert (off <= slack(step, x.double().abs(), SINGLE)).all()


@pytest.mark.parametrize("p", [1, 2, inf])
def test_the_forward_error_of_a_network_is_within_its_bound_near_and_far(p: float) -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(15):
        model, shape = random_network(rng)
        x, other = pairs(model, shape, 8, rng)
        chain = step_chain(model, None, x)
        assert chain.precision == SINGLE
        e, t = forward_error(chain.steps, [operator_norm(s, p) for s in chain.steps], x, p, SINGLE)
        for at in (x, other):
            off = norm(representation(model, find_layer(model), at).flatten(1).double() - chain(at), p)
            assert (off <= e + t * norm((at - x).double(), p)).all()
        assert (e + t < 1e-3 * (1 + norm(chain(x), p) * 50)).all()  # and it is no more than a rounding


def test_the_rounding_along_a_row_covers_the_model_over_the_whole_box() -> None:
    rng = torch.Generator().manual_seed(1)
    for _ in range(10):
        model, shape = random_network(rng)
        x, other = pairs(model, shape, 20, rng)
        chain = step_chain(model, None, x)
        bounds = propagate(chain, torch.zeros(1, *shape), torch.ones(1, *shape))
        most = torch.cat([pull_rounding(chain, bounds, rows) for rows in unit_rows(chain.out_size)])
        computed = representation(model, find_layer(model), other).flatten(1).double()
        assert ((computed - chain(other)).abs() <= most).all()
        low, high = (b.flatten(1) for b in bounds[-1])
        assert ((computed >= low) & (computed <= high)).all()


def test_the_precision_is_the_coarsest_in_use() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert Precision.of(model) == SINGLE
    assert Precision.of(model.double()).sums == 2.0**-53
    assert Precision.of(nn.ReLU(), torch.float64).name == "float64"
    half = Precision.of(nn.Sequential(model[0].float(), model[1].bfloat16()))
    assert (half.name, half.entry, half.sums) == ("bfloat16", 2.0**-8, 2.0**-24)
    with torch.autocast("cpu", torch.bfloat16):
        assert Precision.of(model.float()).name == "bfloat16"
    torch.set_float32_matmul_precision("high")
    try:
        assert Precision.of(model).entry == 2.0**-11
    finally:
        torch.set_float32_matmul_precision("highest")
    with pytest.raises(CertificateError, match=r"may lose every digit.*model.double"):
        SINGLE.share(2_000_000)


def test_a_coarser_model_or_a_coarser_r_is_certified_less() -> None:
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, other = torch.rand(2, 5, 9, generator=rng, dtype=torch.float64)
    r = model[:2](other).detach()
    double = certify(model, None, x, r, 2)
    cast = certify(model, None, x, r.half(), 2)
    assert (cast.bound < double.bound).all()
    assert (certify(model, None, x, r.half(), 2, "reach").details["tau"] > 0).all()
    for dtype in (torch.float32, torch.bfloat16):
        coarser = model.to(dtype)
        found = certify(coarser, None, x.to(dtype), coarser[:2](other.to(dtype)).detach(), 2)
        assert (found.bound < double.bound).all()
        assert (found.details["rounding"] > double.details["rounding"]).all()
        assert str(dtype).removeprefix("torch.") in found.assumptions[-1]
