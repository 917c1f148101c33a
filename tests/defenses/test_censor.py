"""CENSOR: orthogonal and as long as the gradient, tensor by tensor; which is enough to tell a record by."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

from gradveil.attacks.base import build as build_attack
from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.types import Batch, Observation, Update


def test_it_is_orthogonal_to_the_gradient_and_as_long(model: nn.Module, batch: Batch, rng: Generator) -> None:
    plain, sent = (step_gradient(model, batch, build(spec), rng) for spec in ("none", "censor"))
    for name, g in plain.items():
        assert float(sent[name].norm()) == pytest.approx(float(g.norm()), rel=1e-3)
        assert abs(float((sent[name] * g).sum())) < 1e-3 * float(g.square().sum())


def test_of_several_draws_the_one_is_sent_that_moves_the_records_least(model: nn.Module, batch: Batch) -> None:
    each = [step_gradient(model, batch[n : n + 1], build("none"), Generator()) for n in range(3)]

    def moved(spec: str) -> float:
        sent = step_gradient(model, batch, build(spec), Generator().manual_seed(1))
        return sum(float(sum((g[n] * sent[n]).sum() for n in sent)) ** 2 for g in each)

    assert moved("censor:trials=30") < moved("censor:trials=1")


def test_a_server_with_candidates_tells_the_record_by_the_right_angle(model: nn.Module, rng: Generator) -> None:
    listed = Batch(torch.rand(12, 1, 8, 8, generator=rng), torch.arange(12) % 5)
    sent = step_gradient(model, listed[7:8], build("censor"), rng)
    (server,) = build("censor").servers(model)
    seen = Observation(model, Update(sent), (1, 8, 8), 5, candidates=listed)
    found = build_attack("candidates").reconstruct(server.view(replace(seen, client=lambda batch, rng: sent)), rng)
    assert torch.equal(found.inputs[0], listed.inputs[7])


def test_no_trials_are_refused() -> None:
    with pytest.raises(SpecError, match="from 1"):
        build("censor:trials=0")
