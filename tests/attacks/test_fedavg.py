"""Unrolled local steps: the server reruns what the client did, and where one step is assumed it fails."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradveil.attacks.fedavg import FedAvgInversion, _dealt, unrolled_stack
from gradveil.attacks.gs import GS
from gradveil.errors import AttackError
from gradveil.federated.client import local_update
from gradveil.gradients.functional import local_plan, trial_update
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Observation, Update


def train(model: nn.Module, batch: Batch, lr: float, size: int, epochs: int) -> Observation:
    """Run plain SGD in the order of the examples and return what the server sees."""
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    total = {n: torch.zeros_like(w) for n, w in weights.items()}
    steps = 0
    for _ in range(epochs):
        for i in range(0, len(batch), size):
            free = {n: w.clone().requires_grad_() for n, w in weights.items()}
            logits = torch.func.functional_call(model, free, (batch.inputs[i : i + size],))
            gradient = torch.autograd.grad(F.cross_entropy(logits, batch.labels[i : i + size]), list(free.values()))
            for (n, w), g in zip(weights.items(), gradient, strict=True):
                weights[n], total[n] = w - lr * g, total[n] + g
            steps += 1
    update = Update(total, len(batch), steps, lr, size)
    return Observation(model, update, (1, 8, 8), 5, labels=batch.labels)


def error(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).square().mean())


def test_the_unrolled_steps_are_the_clients(model: nn.Module, batch: Batch) -> None:
    seen = train(model.double(), Batch(batch.inputs.double(), batch.labels), lr=0.5, size=2, epochs=3)
    names = tuple(seen.update.gradient)
    found = unrolled_stack([seen]).trial(batch.inputs.double()[None], F.one_hot(batch.labels, 5).double()[None])
    for name in names:
        torch.testing.assert_close(found[name][0] * 6, seen.update.gradient[name])


def test_several_steps_give_the_images_away(model: nn.Module, batch: Batch) -> None:
    two = Batch(batch.inputs[:2], batch.labels[:2])
    seen = train(model, two, lr=1.0, size=1, epochs=2)
    found = FedAvgInversion(steps=1500, optimiser="lbfgs").reconstruct(seen, torch.Generator().manual_seed(0))
    assert error(found.inputs, two.inputs) < 0.03  # by rounding and start 0.01 to 0.02
    assert found.details["relative_residual"] < 1e-4


def test_a_single_step_is_plain_gradient_matching(model: nn.Module, batch: Batch) -> None:
    one = Batch(batch.inputs[:1], batch.labels[:1])
    seen = train(model, one, lr=0.1, size=1, epochs=1)
    rng = torch.Generator().manual_seed
    plain = GS(steps=40, lr=0.1, start="uniform", tol=1e-6, tv=1e-4).reconstruct(seen, rng(0))
    unrolled = FedAvgInversion(steps=40).reconstruct(seen, rng(0))
    torch.testing.assert_close(unrolled.inputs, plain.inputs, atol=1e-3, rtol=0)


def test_pretending_it_was_one_step_leaves_a_residual_that_unrolling_removes(model: nn.Module, batch: Batch) -> None:
    seen = train(model, Batch(batch.inputs[:1], batch.labels[:1]), lr=5.0, size=1, epochs=6)
    truth = seen.update.gradient
    y = F.one_hot(batch.labels[:1], 5).float()[None]
    unrolled = unrolled_stack([seen]).trial(batch.inputs[None, :1], y)
    once = replace(seen, update=replace(seen.update, num_steps=1))
    single = unrolled_stack([once]).trial(batch.inputs[None, :1], y)
    gap = [
        float(sum((6 * f[n][0] / k - truth[n] / k).square().sum() for n in truth))
        for f, k in ((unrolled, 1), (single, 1))
    ]
    assert gap[0] < 1e-6 * gap[1]


def test_updates_with_other_local_settings_are_not_mixed_up(model: nn.Module, batch: Batch) -> None:
    seen = [train(model, Batch(batch.inputs[i : i + 1], batch.labels[i : i + 1]), 1.0, 1, i + 1) for i in range(2)]
    rngs = [torch.Generator().manual_seed(i) for i in range(2)]
    together = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct_many(seen, rngs)
    for i in range(2):
        alone = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct(seen[i], torch.Generator().manual_seed(i))
        torch.testing.assert_close(alone.inputs, together[i].inputs)


def test_recovered_labels_are_dealt_out_evenly(model: nn.Module) -> None:
    update = Update({}, num_examples=8, num_steps=4, batch_size=4)
    labels = torch.tensor([0, 0, 0, 0, 3, 3, 3, 3])
    dealt = _dealt(Observation(model, update, (1, 8, 8), 5, labels=labels))
    assert sorted(dealt.tolist()) == labels.tolist()
    assert sorted(dealt[:4].tolist()) == sorted(dealt[4:].tolist()) == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("examples", "size", "steps", "batches", "epochs"), [(8, 4, 4, 2, 2), (5, 2, 3, 3, 1), (3, None, 2, 1, 2)]
)
def test_the_plan_follows_from_what_the_server_set(
    examples: int, size: int | None, steps: int, batches: int, epochs: int
) -> None:
    plan, found = local_plan(Update({}, examples, steps, batch_size=size))
    assert (len(plan), found) == (batches, epochs)
    assert torch.cat(plan).tolist() == list(range(examples))


def test_steps_that_do_not_fit_the_examples_are_refused() -> None:
    with pytest.raises(AttackError, match="do not fit"):
        local_plan(Update({}, num_examples=8, num_steps=3, batch_size=4))


def test_updates_that_differ_in_the_learning_rate_alone_are_not_mixed_up(model: nn.Module, batch: Batch) -> None:
    seen = [train(model, Batch(batch.inputs[:1], batch.labels[:1]), lr, 1, 2) for lr in (1.0, 5.0)]
    together = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct_many(
        seen, [torch.Generator().manual_seed(3)] * 2
    )
    alone = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct(seen[0], torch.Generator().manual_seed(3))
    torch.testing.assert_close(alone.inputs, together[0].inputs)
    again = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct(seen[1], torch.Generator().manual_seed(4))
    other = FedAvgInversion(steps=30, optimiser="lbfgs").reconstruct_many(
        seen, [torch.Generator().manual_seed(3), torch.Generator().manual_seed(4)]
    )
    torch.testing.assert_close(again.inputs, other[1].inputs)


def test_labels_that_were_read_off_are_the_ones_dealt_out_and_given_ones_keep_their_order(model: nn.Module) -> None:
    x, labels = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(2)), torch.tensor([3, 0, 0, 3])
    seen = train(model, Batch(x, labels), lr=1e-3, size=2, epochs=1)
    known = replace(seen, labels=torch.tensor([0, 0, 3, 3]))
    given = FedAvgInversion(steps=1).reconstruct(known, torch.Generator().manual_seed(0)).labels
    read = FedAvgInversion(steps=1).reconstruct(replace(seen, labels=None), torch.Generator().manual_seed(0)).labels
    assert given is not None
    assert given.tolist() == [0, 0, 3, 3]
    assert read is not None
    assert read.tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("on", ["gradient", "update"])
def test_a_simulated_defence_acts_where_the_clients_does(model: nn.Module, batch: Batch, on: str) -> None:
    seen = train(model, batch, lr=0.5, size=1, epochs=1)
    doubled = replace(seen, simulate=lambda update: {n: 2 * g for n, g in update.items()}, simulate_on=on)  # type: ignore[arg-type]
    faster = seen if on == "update" else replace(seen, update=replace(seen.update, lr=1.0))  # 2 g at lr = g at 2 lr
    y, names = F.one_hot(batch.labels, 5).float()[None], tuple(seen.update.gradient)
    plain, defended = (unrolled_stack([s]).trial(batch.inputs[None], y) for s in (faster, doubled))
    for name in names:
        torch.testing.assert_close(defended[name], 2 * plain[name])


@pytest.mark.parametrize(
    "rule",
    [
        {"momentum": 0.9, "weight_decay": 0.01},
        {"proximal": 0.5, "clip": 0.5},
        {"optimizer": "adam"},
        {"optimizer": "adamw", "weight_decay": 0.1},
    ],
)
def test_the_unrolled_steps_are_those_of_a_real_client(model: nn.Module, batch: Batch, rule: dict[str, Any]) -> None:
    """The client's own code, with its examples in their order; Adam without the blur that gives it slopes."""
    real = Batch(batch.inputs.double(), batch.labels)
    pairs = [real[i : i + 2] for i in range(0, len(real), 2)]
    update = local_update(model.double(), pairs, "none", 0.05, torch.Generator(), epochs=3, batch_size=2, **rule)
    seen = Observation(model, update, (1, 8, 8), 5)
    start = parameters(model)

    def gradient(weights: Params, x: Tensor, y: Tensor) -> Params:
        return torch.func.grad(lambda w: F.cross_entropy(torch.func.functional_call(model, w, (x,)), y))(weights)  # type: ignore[no-any-return]

    found = trial_update(seen, gradient, start, real.inputs, real.labels)
    for name, sent in update.gradient.items():
        torch.testing.assert_close(found[name], sent)
