"""Matching class-wise representations: exact for one example, and nothing but the dense layer is used."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.errors import AttackError
from gradveil.types import Batch, Observation, Update
from gradveil_studies.paper.rep import Rep, _class_means


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
    oblivious, aware = attack(hidden, layer="3"), attack(hidden.masked("3.weight"), layer="3")
    errors = [float((x - batch.inputs[:1]).square().mean()) for x in (oblivious, aware)]
    assert errors[1] < 0.01 * errors[0]


def test_without_the_bias_there_is_no_quotient(probe: nn.Module, batch: Batch) -> None:
    with pytest.raises(AttackError, match="quotients"):
        attack(observe(probe, one(batch)).without("5.bias"))


def test_a_layer_outside_the_chain_is_refused(probe: nn.Module, batch: Batch) -> None:
    with pytest.raises(AttackError, match="It has: 3, 5"):
        attack(observe(probe, one(batch)), layer="0")


def test_only_classes_of_the_batch_are_matched_however_rare(probe: nn.Module, batch: Batch) -> None:
    inputs = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    seen = observe(probe, Batch(inputs, torch.tensor([2, 2, 2, 2, 2, 4])))
    _, counts = Rep()._target(seen, "5")
    assert counts.amin(1).tolist() == counts.amax(1).tolist() == [0, 0, 1, 0, 1]


def test_a_class_without_a_bias_gradient_is_left_out_and_not_divided_by_zero(probe: nn.Module, batch: Batch) -> None:
    seen = observe(probe, Batch(batch.inputs[:2], torch.tensor([0, 3])))
    gradient = seen.update.gradient | {"5.bias": seen.update.gradient["5.bias"] * (torch.arange(5) != 3)}
    r, counts = Rep()._target(replace(seen, update=replace(seen.update, gradient=gradient)), "5")
    assert r.isfinite().all()
    assert counts.amax(1).tolist() == [1, 0, 0, 0, 0]


def test_the_trials_representation_is_the_mean_over_a_class(probe: nn.Module, batch: Batch) -> None:
    seen = observe(probe, batch)
    y = F.one_hot(torch.tensor([[1, 1, 4]]), 5).float()
    found = _class_means(seen, "5")(batch.inputs[None], y)["5"][0]
    r = probe[:5](batch.inputs)  # type: ignore[index]
    torch.testing.assert_close(found[1], r[:2].mean(0))
    torch.testing.assert_close(found[4], r[2])
    assert not found[[0, 2, 3]].any()


def test_an_entry_of_an_earlier_layer_that_any_row_shows_is_matched(probe: nn.Module, batch: Batch) -> None:
    seen = observe(probe, one(batch))
    shown = torch.ones(16, 384)
    shown[:8, :100], shown[:, 200:] = 0.0, 0.0
    _, counts = Rep()._target(replace(seen, weights={"3.weight": shown}), "3")
    assert counts[int(batch.labels[0])].tolist() == [1.0] * 200 + [0.0] * 184
