"""Unmixing a batch behind a fully connected layer: exact where it is to be, and honest where it cannot be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from attacks import helpers_attacks
from attacks.helpers_attacks import noisy, observe, rng
from gradveil.attacks.analytic import mixture_of
from gradveil.attacks.spear import Spear
from gradveil.errors import AttackError
from gradveil.step_rule import StepRule
from gradveil.types import Batch, Observation, Update


def network(*tail: nn.Module, width: int = 64) -> nn.Sequential:
    return helpers_attacks.network(48, *(tail or (nn.ReLU(),)), width=width)


def batch(count: int, seed: int = 1) -> Batch:
    draw = rng(seed)
    return Batch(torch.rand(count, 3, 4, 4, generator=draw), torch.randint(5, (count,), generator=draw))


def order_of(truth: Tensor, found: Tensor) -> Tensor:
    """Return which of those found is each of the truth, after checking that each is there."""
    apart = torch.cdist(truth.flatten(1), found.flatten(1))
    assert float(apart.min(1).values.max()) < 1e-3
    return apart.argmin(1)


def test_a_mixture_is_what_it_says() -> None:
    model, data = network(), batch(6)
    mixture = mixture_of(observe(model, data), "spear")
    y = data.inputs.flatten(1).double() @ mixture.basis.T
    torch.testing.assert_close(y @ mixture.basis, data.inputs.flatten(1).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(y @ mixture.plane, torch.ones(6).double(), atol=1e-5, rtol=0)
    d = torch.linalg.solve(y.T, mixture.rows.T)  # (6, units)
    off = model[:2](data.inputs) < 0
    assert float(d[off].abs().max()) < 1e-6 * float(d.abs().max())


@pytest.mark.parametrize("count", [1, 2, 10])
def test_every_image_and_its_label_come_out(count: int) -> None:
    data = batch(count)
    found = Spear().reconstruct(observe(network(width=200), data), rng())
    assert found.converged
    assert found.objective < 1e-5
    where = order_of(data.inputs, found.inputs)
    assert found.labels is not None
    assert torch.equal(found.labels[where], data.labels)


def test_a_deep_network_with_a_normalisation_before_it() -> None:
    class Normal(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 0.5) / 0.25

    model = nn.Sequential(Normal(), *network(nn.ReLU(inplace=True), nn.Linear(64, 64), nn.ReLU()))
    data = batch(8)
    found = Spear().reconstruct(observe(model, data), rng())
    assert found.converged
    order_of(data.inputs, found.inputs)


def test_the_order_of_a_batch_does_not_matter() -> None:
    model, data = network(), batch(6)
    other = Batch(data.inputs.flip(0), data.labels.flip(0))
    first, second = (Spear().reconstruct(observe(model, d), rng()).inputs for d in (data, other))
    order_of(first, second)


def test_a_problem_has_the_same_answer_alone_and_among_others() -> None:
    model = network()
    seen = [observe(model, batch(4, seed)) for seed in (1, 2)]
    together = Spear().reconstruct_many(seen, [rng(3), rng(4)])
    alone = Spear().reconstruct(seen[1], rng(4))
    assert torch.equal(together[1].inputs, alone.inputs)


def test_several_steps_of_sgd_mix_the_same_images() -> None:
    model, data = network(), batch(6)
    net, lr = network(), 0.05
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(data.inputs), data.labels)
        slopes = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for p, g in zip(net.parameters(), slopes, strict=True):
                p -= lr * g
    before, after = (dict(m.named_parameters()) for m in (model, net))
    update = Update.from_weights(before, after, lr, 6, 3)
    update = replace(update, gradient={n: g.detach() for n, g in update.gradient.items()})
    found = Spear().reconstruct(Observation(model, update, (3, 4, 4), 5), rng())
    assert float(torch.cdist(data.inputs.flatten(1), found.inputs.flatten(1)).min(1).values.max()) < 0.05


@pytest.mark.parametrize("spoiled", ["noise", "rounding", "twins"])
def test_it_says_so_where_it_fails(spoiled: str) -> None:
    model, data = network(), batch(6)
    if spoiled == "twins":  # of one image with two labels: five directions are left
        data = Batch(data.inputs[[0, 0, 1, 2, 3, 4]], torch.tensor([0, 1, 2, 3, 4, 0]))
    seen = observe(model, data)
    if spoiled == "noise":
        seen = noisy(seen, 0.05)
    if spoiled == "rounding":  # to 8 bits
        top = {n: g.abs().max() / 127 for n, g in seen.update.gradient.items()}
        rounded = {n: (g / top[n]).round() * top[n] for n, g in seen.update.gradient.items()}
        seen = replace(seen, update=replace(seen.update, gradient=rounded))
    found = Spear(draws=256).reconstruct(seen, rng())
    assert not found.converged
    assert found.inputs.shape == data.inputs.shape
    assert found.inputs.isfinite().all()


@pytest.mark.parametrize(
    ("model", "count", "words"),
    [
        (network(nn.Sigmoid()), 4, "needs a ReLU behind '1'"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), *network()), 4, "lie before '2'"),
        (network(width=8), 8, "fewer examples"),
        (nn.Sequential(nn.Conv2d(3, 5, 4), nn.Flatten()), 2, "fully connected layer"),
    ],
)
def test_it_refuses_in_one_line(model: nn.Module, count: int, words: str) -> None:
    with pytest.raises(AttackError, match=words) as refusal:
        Spear().reconstruct(observe(model, batch(count)), rng())
    assert "\n" not in str(refusal.value)


def test_it_refuses_updates_of_adam() -> None:
    seen = observe(network(), batch(4))
    with pytest.raises(AttackError, match="divides each by its own size"):
        Spear().reconstruct(replace(seen, update=replace(seen.update, rule=StepRule(optimizer="adam"))), rng())


def test_entries_that_are_not_seen_are_not_made_up() -> None:
    seen = observe(network(), batch(4))
    hidden = torch.ones(64, 48)
    hidden[:, :24] = 0
    with pytest.raises(AttackError, match="every entry"):
        Spear().reconstruct(replace(seen, weights={"1.weight": hidden}), rng())
