"""Outpost: entry by entry, risks by the weights of the round, and what a server makes of it."""

import pytest
import torch
from torch import Generator, nn

from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.types import Batch, Observation, Update


def test_entry_by_entry(model: nn.Module, batch: Batch, rng: Generator) -> None:
    plain = step_gradient(model, batch, build("none"), rng)
    defense = build("outpost:scale=0.5,share=0.3,pruned=0.6").for_round(model, None)
    sent = defense.on_gradient(plain, Generator().manual_seed(4))
    draws = Generator().manual_seed(4)
    every = sorted((abs(v) for g in plain.values() for v in g.flatten().tolist()), reverse=True)
    least = every[round(0.3 * len(every)) - 1]
    for name, g in plain.items():
        noise = torch.randn(g.shape, generator=draws).flatten().tolist()
        weights = model.get_parameter(name).flatten().tolist()
        mean = sum(weights) / len(weights)
        risk = min(1.0, sum((w - mean) ** 2 for w in weights) / (len(weights) - 1))
        gone = sorted(range(g.numel()), key=lambda i, g=g: abs(float(g.flatten()[i])))[: round(0.6 * g.numel())]
        slow = [
            (0.0 if i in gone else v) + (0.5 * risk * noise[i] if abs(v) >= least else 0.0)
            for i, v in enumerate(g.flatten().tolist())
        ]
        torch.testing.assert_close(sent[name].flatten(), torch.tensor(slow))


def test_the_risk_is_one_where_no_weights_are_known(model: nn.Module) -> None:
    assert set(build("outpost:scale=0.5").stds(dict(model.named_parameters())).values()) == {0.5}


def test_a_server_that_knows_it_prunes_its_trials_and_weighs_by_the_noise(
    model: nn.Module, batch: Batch, rng: Generator
) -> None:
    defense = build("outpost").for_round(model, None)
    sent = step_gradient(model, batch, defense, rng)
    (server,) = defense.servers(model)
    view = server.view(Observation(model, Update(sent, 3), (1, 8, 8), 5))
    assert view.noise == defense.stds(sent)
    assert all(torch.equal(view.weights[n] != 0, g != 0) for n, g in sent.items())
    trial = view.sent(step_gradient(model, batch, build("none"), rng))
    assert all(int((g == 0).sum()) == round(0.8 * g.numel()) for g in trial.values())


@pytest.mark.parametrize("spec", ["outpost:scale=-1", "outpost:share=2", "outpost:pruned=-0.1"])
def test_settings_that_make_no_sense_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        build(spec)
