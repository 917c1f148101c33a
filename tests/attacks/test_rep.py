"""Matching class-wise representations: exact for one example, and nothing but the dense layer is used."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.rep import Rep
from gradveil.errors import AttackError
from gradveil.types import Batch, Observation, Update


@pytest.fixture
def probe() -> nn.Module:
    """One convolution with more outputs than pixels, so that r determines the image; two dense layers."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 16), nn.Sigmoid(),
            nn.Linear(16, 5),
        )  # fmt: skip


def observe(model: nn.Module, batch: Batch) -> Observation:
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    update = Update(dict(zip(names, gradient, strict=True)), len(batch))
    return Observation(model, update, (1, 8, 8), 5, labels=batch.labels)


def attack(seen: Observation, **settings: object) -> Tensor:
    chosen = Rep(**({"steps": 40, "restarts": 1} | settings))  # type: ignore[arg-type]
    return chosen.reconstruct(seen, torch.Generator().manual_seed(0)).inputs


def one(batch: Batch) -> Batch:
    return Batch(batch.inputs[:1], batch.labels[:1])


def test_the_representation_of_one_example_gives_its_image(probe: nn.Module, batch: Batch) -> None:
    found = attack(observe(probe, one(batch)), layer="3")
    assert float((found - batch.inputs[:1]).square().mean()) < 1e-4


def test_only_the_chain_of_dense_layers_is_looked_at(probe: nn.Module, batch: Batch) -> None:
    seen = observe(probe, one(batch))
    lied = seen.update.gradient | {"0.weight": torch.randn(6, 1, 3, 3, generator=torch.Generator().manual_seed(2))}
    assert torch.equal(
        attack(seen, steps=2), attack(replace(seen, update=replace(seen.update, gradient=lied)), steps=2)
    )


def test_the_last_layer_is_matched_where_none_is_named(probe: nn.Module, batch: Batch) -> None:
    found = attack(observe(probe, one(batch)))
    gap = (probe[:5](found) - probe[:5](batch.inputs[:1])).detach().square().mean()  # type: ignore[index]
    assert float(gap) < 1e-6


def test_a_batch_matches_the_mean_of_each_class(probe: nn.Module, batch: Batch) -> None:
    two = Batch(batch.inputs[:2], torch.tensor([0, 3]))
    seen = observe(probe, two)
    found = Rep(steps=40, restarts=1).reconstruct(seen, torch.Generator().manual_seed(0))
    w, b = seen.update.gradient["5.weight"], seen.update.gradient["5.bias"]
    inferred = w[[0, 3]] / b[[0, 3], None]
    assert float((probe[:5](found.inputs) - inferred).detach().square().mean()) < 1e-3  # type: ignore[index]


def test_hidden_entries_are_left_out_of_the_matching(probe: nn.Module, batch: Batch) -> None:
    seen = observe(probe, one(batch))
    pruned = dict(seen.update.gradient)
    pruned["3.weight"] = pruned["3.weight"] * (torch.arange(384) % 5 > 1)
    hidden = replace(seen, update=replace(seen.update, gradient=pruned))
    naive, aware = attack(hidden, layer="3"), attack(hidden.masked("3.weight"), layer="3")
    errors = [float((x - batch.inputs[:1]).square().mean()) for x in (naive, aware)]
    assert errors[1] < 0.01 * errors[0]


def test_without_the_bias_there_is_no_quotient(probe: nn.Module, batch: Batch) -> None:
    with pytest.raises(AttackError, match="quotients"):
        attack(observe(probe, one(batch)).without("5.bias"))


def test_a_layer_outside_the_chain_is_refused(probe: nn.Module, batch: Batch) -> None:
    with pytest.raises(AttackError, match="It has: 3, 5"):
        attack(observe(probe, one(batch)), layer="0")
