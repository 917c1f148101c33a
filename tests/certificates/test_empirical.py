"""What an inversion reaches: it must win where it can, and never look at the truth."""

import torch
from torch import Generator, nn

from gradveil.representation.certify import certify, invert
from gradveil.representation.problem import Problem
from gradveil.types import Batch


def test_an_invertible_representation_is_inverted(rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 2))
    x = torch.rand(4, 1, 4, 4, generator=rng)
    r = model[:-1](x).detach()
    found = certify(model, None, x, r, 2, "empirical", rng=rng)
    assert (found.details["mse"] < 1e-3).all()
    assert (found.details["residual"] < 1e-2).all()
    assert not found.sound


def test_of_several_starts_the_one_that_matches_best_is_kept(model: nn.Module, batch: Batch, rng: Generator) -> None:
    r = model[:-1](batch.inputs).detach()
    problem = Problem.make(model, None, batch.inputs, r, 2, rng=rng)
    answer, residual = invert(problem, steps=3, restarts=6, lr=0.05)
    again = (model[:-1](answer).detach() - r).norm(dim=1)
    torch.testing.assert_close(residual, again.double(), rtol=1e-4, atol=1e-6)


def test_the_answer_stays_in_the_range_and_repeats_from_a_seed(model: nn.Module, batch: Batch) -> None:
    r = torch.full((3, 64), -5.0)
    state = torch.get_rng_state()
    runs = [
        certify(model, None, batch.inputs, r, 2, "empirical", rng=torch.Generator().manual_seed(s)).bound
        for s in (0, 0, 1)
    ]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert torch.equal(state, torch.get_rng_state())
    assert (runs[0] ** 2 / 64 <= 1).all()
