"""Batch norm's running statistics, sent back by a client, show those of its own batch."""

from dataclasses import replace

import pytest
import torch
from torch import Generator, nn

from gradveil.attacks.gs import GS
from gradveil.attacks.search.matching import sending_norms, sent_statistics, statistics_term
from gradveil.federated.settings import Local
from gradveil.protection.defense import build
from gradveil.threats.trial import observe
from gradveil.types import Batch, Observation


def network(momentum: float | None = 0.1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=momentum), nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(),
            nn.Flatten(), nn.Linear(128, 5),
        )  # fmt: skip


@pytest.fixture
def images(rng: Generator) -> Batch:
    return Batch(torch.rand(4, 1, 8, 8, generator=rng), torch.tensor([0, 1, 3, 3]))


def seen_by(model: nn.Module, images: Batch, local: Local, defense: str = "none") -> Observation:
    return observe(model, images, build(defense), torch.Generator().manual_seed(0), 5, None, 0.1, True, local=local)


def own_statistics(model: nn.Module, images: Batch) -> dict[str, torch.Tensor]:
    """The batch's means and unbiased variances at the first batch norm, in plain torch."""
    with torch.no_grad():
        h = model[0](images.inputs)  # type: ignore[index]
    return {"1.running_mean": h.mean((0, 2, 3)), "1.running_var": h.var((0, 2, 3))}


@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize("defense", ["none", "gaussian:scale=10"])
def test_one_step_shows_the_statistics_of_the_batch(images: Batch, momentum: float | None, defense: str) -> None:
    model = network(momentum)
    model(torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)))  # its running statistics are not fresh
    found = sent_statistics(seen_by(model, images, Local(batch_size=None), defense))
    assert len(found) == 4
    for name, own in own_statistics(model, images).items():
        torch.testing.assert_close(found[name], own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_of_several_steps_a_mean_is_shown_that_lies_between_theirs(images: Batch, momentum: float | None) -> None:
    model = network(momentum)
    seen = seen_by(model, images, Local(epochs=1, batch_size=2))
    found = sent_statistics(seen)["1.running_mean"]
    with torch.no_grad():
        each = torch.stack([model[0](x[None]).mean((0, 2, 3)) for x in images.inputs])  # type: ignore[index]
    low, high = each.min(0).values, each.max(0).values
    assert bool(((found > low - 0.1) & (found < high + 0.1)).all())  # the weights moved a little between the steps


def test_the_term_vanishes_at_the_clients_own_images(images: Batch) -> None:
    seen = seen_by(network(), images, Local(batch_size=None))
    (term,) = statistics_term([seen], torch.tensor([0, 0]), 1.0)
    far = term(torch.stack([images.inputs, images.inputs.flip(2) ** 2]))
    assert far[0] < 1e-6 < 1e-2 < far[1]
    torch.testing.assert_close(term.take(torch.tensor([0]))(images.inputs[None]), far[:1])


def test_no_term_where_nothing_was_sent(images: Batch) -> None:
    seen = seen_by(network(), images, Local(batch_size=None))
    owner = torch.tensor([0])
    assert statistics_term([replace(seen, update=replace(seen.update, buffers={}))], owner, 1.0) == ()
    assert statistics_term([seen], owner, 0.0) == ()
    assert statistics_term([seen_by(network().eval(), images, Local(batch_size=None))], owner, 1.0) == ()
    assert sending_norms(network()) == 2
    assert sending_norms(network().eval()) == 0


def test_an_attack_that_uses_them_ends_with_statistics_nearer_to_the_clients(images: Batch) -> None:
    seen = seen_by(network(), images, Local(batch_size=None))
    (term,) = statistics_term([seen], torch.tensor([0]), 1.0)
    with_them, without = (
        GS(steps=60, lr=0.1, bn=bn, tv=1e-4, start="uniform").reconstruct(seen, torch.Generator().manual_seed(0)).inputs
        for bn in (0.1, 0.0)
    )
    assert float(term(with_them[None])) < 0.5 * float(term(without[None]))
