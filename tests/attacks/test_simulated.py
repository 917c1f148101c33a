"""A server that runs the defence on its own trials, with random numbers of its own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

import gradveil
from gradveil.errors import AttackError
from gradveil.threats.meter import leak_meter
from gradveil.tree import Params
from gradveil.types import Batch, GaussianPrior, Observation, Update

TRUTH = Batch(torch.rand(1, 1, 4, 4, generator=Generator().manual_seed(3)), torch.tensor([1]))
PRIOR = GaussianPrior.fit(torch.rand(50, 1, 4, 4, generator=Generator().manual_seed(4)), rank=10)


def observed(model: nn.Module) -> Observation:
    loss = F.cross_entropy(model(TRUTH.inputs), TRUTH.labels)
    names, weights = zip(*model.named_parameters(), strict=True)
    gradient = dict(zip(names, torch.autograd.grad(loss, weights), strict=True))
    return Observation(model, Update(gradient), (1, 4, 4), 4, labels=TRUTH.labels, prior=PRIOR)


@pytest.fixture
def seen() -> Observation:
    torch.manual_seed(0)
    return observed(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 4)))


def with_noise(update: Params) -> Params:
    return {n: g + 0.5 * torch.randn_like(g) for n, g in update.items()}


def by_chance_of_its_values(update: Params) -> Params:
    return {n: g * torch.bernoulli(torch.sigmoid(g.detach())) for n, g in update.items()}


def rebuilt(spec: str, seen: Observation) -> Tensor:
    rngs = [Generator().manual_seed(k) for k in range(2)]
    return gradveil.attack(spec).reconstruct_many([seen, seen], rngs)[0].inputs


@pytest.mark.parametrize("spec", ["newton:steps=3", "fedavg:steps=3", "dlg:steps=3", "gs:steps=3,tv=0,start=uniform"])
def test_a_simulated_defence_may_draw_and_is_still_a_function(spec: str, seen: Observation) -> None:
    noisy = replace(seen, simulate=with_noise)
    state = torch.get_rng_state()
    found = rebuilt(spec, noisy)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(rebuilt(spec, noisy), found)
    assert not torch.equal(rebuilt(spec, seen), found)


def test_noise_of_a_simulated_defence_does_not_change_what_is_measured(seen: Observation) -> None:
    noisy = replace(seen, simulate=with_noise)
    assert leak_meter(noisy, TRUTH, PRIOR).mse == pytest.approx(leak_meter(seen, TRUTH, PRIOR).mse)


def test_draws_that_hang_on_values_are_run_one_by_one_or_refused(seen: Observation) -> None:
    drawing = replace(seen, simulate=by_chance_of_its_values)
    for spec in ("fedavg:steps=3", "gs:steps=3"):
        assert torch.equal(rebuilt(spec, drawing), rebuilt(spec, drawing))
    with pytest.raises(AttackError, match="cannot be run on many trials at once"):
        rebuilt("newton:steps=3", drawing)
