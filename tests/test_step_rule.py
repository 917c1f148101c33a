"""The rule of a local step: torch.optim's own steps, and what a server can take off again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil.errors import UpdateError
from gradveil.step_rule import Momenta, StepRule
from gradveil.tree import Params
from gradveil.types import Observation, Update

Make = Callable[[list[Tensor], float], torch.optim.Optimizer]
RULES: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({}, lambda p, lr: torch.optim.SGD(p, lr)),
    "momentum": ({"momentum": 0.9}, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)),
    "decay": (
        {"momentum": 0.5, "weight_decay": 0.1},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.5, weight_decay=0.1),
    ),
    "adam": ({"optimizer": "adam"}, lambda p, lr: torch.optim.Adam(p, lr)),
    "adam, decay": (
        {"optimizer": "adam", "weight_decay": 0.1},
        lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.1),
    ),
    "adamw": (
        {"optimizer": "adamw", "weight_decay": 0.1},
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
    ),
}


def gradients(rng: Generator, count: int = 5) -> list[Params]:
    return [
        {n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in (("w", (3, 2)), ("b", (3,)))}
        for _ in range(count)
    ]


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_torch(name: str, clip: float, rng: Generator) -> None:
    settings, make = RULES[name]
    rule, lr = StepRule(**settings, clip=clip), 0.1
    steps = gradients(rng)
    start = gradients(rng, 1)[0]
    leaves = {n: w.clone().requires_grad_() for n, w in start.items()}
    optimizer = make(list(leaves.values()), lr)
    weights, kept = start, Momenta()
    for gradient in steps:
        for n, w in leaves.items():
            w.grad = gradient[n].clone()
        if clip:
            nn.utils.clip_grad_norm_(leaves.values(), clip)
        optimizer.step()
        moved, kept = rule.direction(gradient, weights, start, kept)
        weights = {n: w - lr * moved[n] for n, w in weights.items()}
        assert all(torch.allclose(weights[n], leaves[n], rtol=1e-9, atol=1e-12) for n in weights)


def test_a_proximal_pull_is_part_of_the_gradient_that_is_clipped(rng: Generator) -> None:
    (gradient,), (start,), (weights,) = (gradients(rng, 1) for _ in range(3))
    moved, _ = StepRule(proximal=2.0, clip=1.0).direction(gradient, weights, start, Momenta())
    whole = torch.cat([(gradient[n] + 2.0 * (weights[n] - start[n])).flatten() for n in ("w", "b")])
    assert torch.allclose(torch.cat([moved[n].flatten() for n in ("w", "b")]), whole / (whole.norm() + 1e-6))


def test_shares_count_how_often_momentum_uses_a_gradient(rng: Generator) -> None:
    rule, weights, kept, total = StepRule(momentum=0.9), gradients(rng, 1)[0], Momenta(), torch.zeros(3)
    for t in range(4):  # one gradient that is 1 at step t, in entry t
        g = torch.eye(4)[t][:3]
        moved, kept = rule.direction({"b": g}, weights, weights, kept)
        total = total + moved["b"]
    counts = [(1 - 0.9**k) / 0.1 for k in (4, 3, 2, 1)]
    assert torch.allclose(total, torch.tensor(counts[:3]))
    assert rule.shares(4) == pytest.approx((sum(counts), sum(c * c for c in counts) ** 0.5))
    assert StepRule().shares(9) == (9.0, 3.0)


@pytest.mark.parametrize("name", ["sgd", "momentum", "decay", "adamw"])
def test_the_server_takes_off_what_decay_added_to_one_step(name: str, rng: Generator) -> None:
    rule = StepRule(**RULES[name][0])
    model = nn.Linear(2, 3).double()
    gradient = {"weight": gradients(rng, 1)[0]["w"], "bias": gradients(rng, 1)[0]["b"]}
    weights = {n: p.detach() for n, p in model.named_parameters()}
    sent, _ = rule.direction(gradient, weights, weights, Momenta())
    one = Observation(model, Update(sent, rule=rule), (2,), 3).as_one_step()
    expected, _ = rule.bare.direction(gradient, weights, weights, Momenta())
    assert all(torch.allclose(one.update.gradient[n], expected[n]) for n in weights)
    assert one.update.rule == rule.bare
    assert one.as_one_step() is one


def test_a_mask_is_read_through_weight_decay(rng: Generator) -> None:
    model, rule = nn.Linear(2, 3).double(), StepRule(weight_decay=0.1)
    weights = {n: p.detach() for n, p in model.named_parameters()}
    gradient = {"weight": torch.tensor([[0.0, 1.0]] * 3).double(), "bias": torch.ones(3).double()}
    sent, _ = rule.direction(gradient, weights, weights, Momenta())
    assert bool(sent["weight"].all())
    view = Observation(model, Update(sent, rule=rule), (2,), 3).masked("*")
    assert torch.equal(view.weights["weight"], gradient["weight"])


@pytest.mark.parametrize("zero", [True, False])
def test_steps_of_adam_have_a_slope(zero: bool, rng: Generator) -> None:
    g = torch.zeros(3) if zero else torch.randn(3, generator=rng)
    g.requires_grad_()
    rule, weights = StepRule(optimizer="adam"), {"b": torch.zeros(3)}
    sharp, _ = rule.direction({"b": g}, weights, weights, Momenta())
    soft, _ = rule.direction({"b": g}, weights, weights, Momenta(), blur=1.0)
    assert bool(torch.isfinite(torch.autograd.grad(sharp["b"].sum(), g)[0]).all())
    (slope,) = torch.autograd.grad(soft["b"].square().sum(), g)
    assert bool(torch.isfinite(slope).all())
    assert zero or bool(slope.abs().min() > 1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "adm"}, "Did you mean 'adam'"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"optimizer": "adam", "momentum": 0.9}, "belongs to sgd"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UpdateError, match=said):
        StepRule(**settings)


@pytest.mark.parametrize(
    ("examples", "steps", "size", "said"),
    [
        (1, 1, None, "one local step on 1 example (sgd, learning rate 0.1)"),
        (8, 2, None, "2 local steps on 8 examples, all of them at once (sgd, learning rate 0.1)"),
        (8, 2, 4, "2 local steps on 8 examples, batches of 4 (sgd, learning rate 0.1)"),
    ],
)
def test_the_local_training_in_words(examples: int, steps: int, size: int | None, said: str) -> None:
    assert Update({}, examples, steps, 0.1, size).schedule == said
