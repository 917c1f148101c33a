"""Between the first and the last weights: one gradient stands for many steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, nn

from gradveil import models
from gradveil.attacks.fedavg import Surrogate
from gradveil.attacks.gs import GS
from gradveil.federated.client import local_update
from gradveil.step_rule import PLAIN
from gradveil.types import Batch, Observation


@pytest.fixture
def images(rng: Generator) -> Batch:
    """Smooth images, as pictures are."""
    x = nn.functional.interpolate(torch.rand(2, 1, 3, 3, generator=rng), (8, 8), mode="bicubic", align_corners=True)
    return Batch(x.clamp(0, 1), torch.tensor([1, 3]))


def seen_after(network: nn.Module, one: Batch, lr: float, epochs: int, **more: Any) -> Observation:
    update = local_update(network, one, "none", lr, torch.Generator().manual_seed(0), epochs, None, **more)
    return Observation(network, update, (1, 8, 8), 5, labels=one.labels)


def error(found: torch.Tensor, truth: Batch) -> float:
    return float((found - truth.inputs).square().mean())


def test_after_many_steps_it_sees_what_one_step_at_the_first_weights_does_not(images: Batch) -> None:
    network, one = models.build("lenet:strides=2/1,activation=relu,init=kaiming", (1, 8, 8), 5, 0), images[:1]
    seen = seen_after(network, one, 0.05, 8)
    rng = torch.Generator().manual_seed
    first = GS(steps=200, tv=1e-4).reconstruct(seen, rng(0))
    between = Surrogate(steps=200).reconstruct(seen, rng(0))
    assert between.details["relative_residual"] < 0.5 * first.details["relative_residual"]
    assert error(between.inputs, one) < error(first.inputs, one)
    assert 0 < between.details["place"] < 1


def test_with_one_tiny_step_it_is_gs(network: nn.Module, images: Batch) -> None:
    seen = seen_after(network, images[:1], 1e-7, 1)
    rng = torch.Generator().manual_seed
    plain = GS(steps=30, lr=0.1, tv=1e-4, start="uniform").reconstruct(seen, rng(0))
    between = Surrogate(steps=30).reconstruct(seen, rng(0))
    torch.testing.assert_close(between.inputs, plain.inputs, atol=1e-3, rtol=0)


def test_updates_that_moved_apart_are_not_mixed_up(network: nn.Module, images: Batch) -> None:
    seen = [seen_after(network, images[i : i + 1], lr, 6) for i, lr in enumerate((0.1, 1.0))]
    together = Surrogate(steps=20).reconstruct_many(seen, [torch.Generator().manual_seed(i) for i in range(2)])
    for i in range(2):
        alone = Surrogate(steps=20).reconstruct(seen[i], torch.Generator().manual_seed(i))
        torch.testing.assert_close(alone.inputs, together[i].inputs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", [{"optimizer": "adam"}, {"weight_decay": 0.3}])
def test_it_follows_the_clients_optimiser(images: Batch, rule: dict[str, Any]) -> None:
    network, one = models.build("lenet:strides=2/1,activation=relu,init=kaiming", (1, 8, 8), 5, 0), images[:1]
    seen = seen_after(network, one, 1e-3, 4, **rule)
    untold = replace(seen, update=replace(seen.update, rule=PLAIN))
    found, blind = (Surrogate(steps=200).reconstruct(s, torch.Generator().manual_seed(0)) for s in (seen, untold))
    assert error(found.inputs, one) < 0.5 * error(blind.inputs, one)
