"""Matching the representation alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.rep import Rep, class_representation
from gradveil.defenses.nothing import NoDefense
from gradveil.defenses.step import step_gradient
from gradveil.errors import AttackError
from gradveil.types import Batch, Observation, Update


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


@pytest.fixture
def wide() -> nn.Module:
    """A network whose representation (8 x 8 x 8) determines its input."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(512, 5)).double()


def observe(model: nn.Module, batch: Batch) -> Observation:
    update = Update(step_gradient(model, batch, NoDefense(), seeded()), len(batch))
    return Observation(model, update, (1, 8, 8), 5)


def test_the_representation_is_exact_for_one_example(wide: nn.Module, batch: Batch) -> None:
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    seen = replace(observe(wide, one), labels=one.labels)
    torch.testing.assert_close(class_representation(seen, "3"), wide[:3](one.inputs).detach())  # type: ignore[index]


def test_without_the_bias_its_direction_is_right(wide: nn.Module, batch: Batch) -> None:
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    seen = replace(observe(wide, one), labels=one.labels).without("3.bias")
    r = wide[:3](one.inputs).detach()  # type: ignore[index]
    cosine = torch.nn.functional.cosine_similarity(class_representation(seen, "3"), r)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


@pytest.mark.parametrize("hidden", [(), ("0.*",), ("0.*", "3.bias")])
def test_the_image_comes_back_from_the_representation_alone(
    wide: nn.Module, batch: Batch, hidden: tuple[str, ...]
) -> None:
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    seen = replace(observe(wide, one), labels=one.labels)
    found = Rep(steps=60, restarts=2).reconstruct(seen.without(*hidden) if hidden else seen, seeded())
    assert (found.inputs - one.inputs).square().mean() < 1e-3


def test_examples_of_one_class_get_its_mean(wide: nn.Module, batch: Batch) -> None:
    same = Batch(batch.inputs.double(), torch.zeros(3, dtype=torch.long))
    seen = replace(observe(wide, same), labels=same.labels)
    r = class_representation(seen, "3")
    mean = wide[:3](same.inputs).mean(0).detach()  # type: ignore[index]
    assert torch.nn.functional.cosine_similarity(r[0] - 0.5, mean - 0.5, dim=0) > 0.99


def test_without_the_weight_it_says_what_is_missing(wide: nn.Module, batch: Batch) -> None:
    one = Batch(batch.inputs[:1].double(), batch.labels[:1])
    with pytest.raises(AttackError, match=r"rep needs the gradient of 3\.weight"):
        Rep().reconstruct(observe(wide, one).without("3.weight"), seeded())
