"""What the command and the report are given: every kind for every defended layer, and the metered servers."""

import torch
from torch import Generator, nn

from gradveil.auditing.certificates import layer_certificates, metered
from gradveil.protection.defense import build
from gradveil.types import Batch, GaussianPrior


def test_each_defended_layer_has_each_kind_and_each_says_a_sentence(
    model: nn.Module, batch: Batch, rng: Generator
) -> None:
    found = layer_certificates(model, batch, build("representation:share=0.3"), rng)
    assert [p.kind for p in found] == ["local", "global", "box", "reach", "empirical"]
    assert {p.layer for p in found} == {"5"}
    assert all(p.words().endswith(".") for p in found)
    assert "not a certificate" in found[0].words()
    assert found[3].words().startswith("No image has r′")


def test_a_defence_without_a_representation_promises_nothing(model: nn.Module, batch: Batch, rng: Generator) -> None:
    assert layer_certificates(model, batch, build("gaussian:scale=0.1"), rng) == []


def test_a_model_that_is_no_chain_keeps_the_kinds_that_need_none(batch: Batch, rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Softmax(1), nn.Linear(64, 3))
    found = {p.kind: p for p in layer_certificates(model, batch, build("representation:share=0.3"), rng)}
    assert found["local"].certificate is not None
    assert found["global"].certificate is None
    assert "Cannot walk through '_softmax'" in found["global"].words()


def test_only_servers_whose_knowledge_shows_are_metered(model: nn.Module, batch: Batch, rng: Generator) -> None:
    one = Batch(batch.inputs[:1], batch.labels[:1])
    prior = GaussianPrior.white(torch.full((64,), 0.5), 0.3)
    ours = metered(model, one, build("representation:share=0.5"), 5, rng, prior)
    assert [m.server for m in ours][:2] == ["drop", "mask"]
    none = metered(model, one, build("none"), 5, rng, prior)
    assert [m.server for m in none] == ["plain"]
    noisy = metered(model, one, build("gaussian:scale=10,relative=true"), 5, rng, prior)
    assert noisy[0].leak.mse > 10 * none[0].leak.mse


def test_a_server_that_only_switches_its_attack_is_not_metered(batch: Batch, rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Sigmoid(), nn.Linear(8, 5))
    one, ours = Batch(batch.inputs[:1], batch.labels[:1]), build("representation:share=0.5")
    names = [known.name for known in ours.servers(model)]
    assert "analytic" in names  # dW/db of the first layer: another attack on the same numbers
    assert [m.server for m in metered(model, one, ours, 5, rng)] == [n for n in names if n != "analytic"]
