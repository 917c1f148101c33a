"""The server that has a list of candidates picks the most likely one, through any defence."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import binom
from torch import Generator, Tensor, nn

from gradveil.attacks.candidates import Candidates
from gradveil.errors import AttackError
from gradveil.gradients.functional import unroll
from gradveil.privacy.bounds import rero_gaussian
from gradveil.tree import Params, parameters
from gradveil.types import Batch, Observation, Reconstruction, Update

SHAPE, CLASSES, MANY = (1, 4, 4), 4, 10
LISTED = Batch(2 * torch.rand(MANY, *SHAPE, generator=Generator().manual_seed(3)) - 1, torch.arange(MANY) % CLASSES)


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, CLASSES))


def gradient_of(model: nn.Module, batch: Batch) -> Params:
    loss = F.cross_entropy(model(batch.inputs), batch.labels)
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def step_gradient_of(model: nn.Module, weights: Params, x: Tensor, y: Tensor) -> Params:
    loss = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def with_noise(gradient: Params, std: float, rng: Generator) -> Params:
    return {n: g + std * torch.randn(g.shape, generator=rng) for n, g in gradient.items()}


def clipped(gradient: Params, most: float = 0.5) -> Params:
    size = torch.stack([g.square().sum() for g in gradient.values()]).sum().sqrt()
    return {n: g * most / size.clamp_min(most) for n, g in gradient.items()}


def at(*places: int) -> Batch:
    return Batch(LISTED.inputs[list(places)], LISTED.labels[list(places)])


def observed(model: nn.Module, sent: Params, **more: object) -> Observation:
    return Observation(model, Update(sent), SHAPE, CLASSES, bounds=(-1.0, 1.0), candidates=LISTED, **more)  # type: ignore[arg-type]


def choice(found: Reconstruction) -> list[int]:
    return [int((LISTED.inputs - x).flatten(1).norm(dim=1).argmin()) for x in found.inputs]


def slow(rounds: list[Observation]) -> Tensor:
    """Return the log likelihood of each candidate: one after the other, entry by entry, in plain autograd."""
    scores = []
    for j in range(MANY):
        total = 0.0
        for s in rounds:
            mean = gradient_of(s.model, at(j))
            for name, y in s.update.gradient.items():
                weight = s.weights.get(name, torch.ones_like(y)).double()
                v, apart = s.noise[name] ** 2, (y.double() - mean[name].double()).square()
                total -= float((weight * (apart / v + math.log(2 * math.pi * v))).sum()) / 2
        scores.append(total)
    return torch.tensor(scores, dtype=torch.float64)


def test_the_likelihoods_of_all_rounds_are_those_of_a_slow_loop() -> None:
    rng, rounds = seeded(1), []
    for t, std in enumerate((0.3, 0.3, 0.2)):
        model = network(min(t, 1))  # the second and the third at the same weights
        sent = with_noise(gradient_of(model, at(4)), std, rng)
        weights = {"1.weight": (torch.rand(8, 16, generator=rng) > 0.5).float()}
        rounds.append(observed(model, sent, noise=dict.fromkeys(sent, std), weights=weights if t else {}))
    found = Candidates().reconstruct(replace(rounds[0], rounds=tuple(rounds[1:])), rng)
    expected = slow(rounds)
    assert choice(found) == [int(expected.argmax())]
    assert found.objective == pytest.approx(-float(expected.max()), rel=1e-4)  # the floor beside the noise is small
    best, second = expected.topk(2).values
    assert found.details["margin"] == pytest.approx(float(best - second), rel=1e-3)
    assert found.details["rounds"] == 3


@pytest.mark.parametrize("j", [0, 7])
def test_undefended_the_right_one_is_picked(j: int) -> None:
    model = network()
    found = Candidates().reconstruct(observed(model, gradient_of(model, at(j))), seeded())
    assert choice(found) == [j]
    assert found.labels is not None
    assert found.labels.tolist() == [j % CLASSES]
    assert found.converged


def test_tensors_that_are_missing_or_weigh_nothing_are_not_looked_at() -> None:
    model = network()
    sent = gradient_of(model, at(2))
    wrong = sent | {"1.weight": gradient_of(model, at(3))["1.weight"] * 9}
    seen = observed(model, wrong)
    for view in (seen.without("1.weight"), replace(seen, weights={"1.weight": torch.zeros(8, 16)})):
        assert choice(Candidates().reconstruct(view, seeded())) == [2]


def test_the_one_record_that_is_missing_comes_back_where_the_others_are_known() -> None:
    model = network()
    seen = observed(model, gradient_of(model, at(1, 2, 6)), others=at(1, 2))
    one = replace(seen, update=replace(seen.update, num_examples=3))
    found = Candidates().reconstruct(one, seeded())
    assert choice(found) == [6]
    assert found.inputs.shape == (1, *SHAPE)
    with pytest.raises(AttackError, match="2 others are given"):
        Candidates().reconstruct(replace(one, update=replace(one.update, num_examples=4)), seeded())


def test_several_local_steps_are_run() -> None:
    model = network()
    y = F.one_hot(at(4, 9).labels, CLASSES).float()
    plan = Update({}, num_examples=2, num_steps=4, lr=2.0, batch_size=1)
    start = {n: p.clone().requires_grad_() for n, p in parameters(model).items()}
    sent = unroll(partial(step_gradient_of, model), start, at(4, 9).inputs, y, plan)
    update = replace(plan, gradient={n: g.detach() for n, g in sent.items()})
    seen = replace(observed(model, {}), update=update, others=at(4))
    found = Candidates().reconstruct(seen, seeded())
    assert choice(found) == [9]
    assert found.details["margin"] > 1000


def test_the_order_of_the_list_changes_nothing() -> None:
    model, rng = network(), seeded(2)
    sent = with_noise(gradient_of(model, at(3)), 0.2, rng)
    seen = observed(model, sent, noise=dict.fromkeys(sent, 0.2))
    order = torch.randperm(MANY, generator=rng)
    turned = replace(seen, candidates=Batch(LISTED.inputs[order], LISTED.labels[order]))
    first, again = (Candidates().reconstruct(s, seeded()) for s in (seen, turned))
    assert torch.equal(first.inputs, again.inputs)
    assert first.objective == pytest.approx(again.objective)


def test_no_more_are_picked_than_reconstruction_robustness_allows() -> None:
    model, clip, std, trials = network(), 0.5, 0.5, 150
    hits = 0
    for k in range(trials):
        sent = with_noise(clipped(gradient_of(model, at(k % MANY)), clip), std, seeded(k))
        seen = observed(model, sent, noise=dict.fromkeys(sent, std), simulate=clipped)
        hits += choice(Candidates().reconstruct(seen, seeded())) == [k % MANY]
    bound = rero_gaussian(1 / MANY, clip / std)
    assert hits <= binom.ppf(0.999, trials, bound)
    assert hits >= binom.ppf(0.99, trials, 1 / MANY)  # and it sees something


Defence = Callable[[Params, Generator], Params]
BROKEN: dict[str, Defence] = {
    "sign": lambda g, rng: {n: v.sign() for n, v in g.items()},
    "random scale": lambda g, rng: {n: v * (0.5 + torch.rand(1, generator=rng)) for n, v in g.items()},
    "random mask": lambda g, rng: {n: v * (torch.rand(v.shape, generator=rng) > 0.7) for n, v in g.items()},
    "noise of one seed": lambda g, rng: with_noise(g, 5.0, seeded(77)),
    "little noise, law not given": lambda g, rng: with_noise(g, 0.02, rng),
    "clipped, little noise": lambda g, rng: with_noise(clipped(g, 0.3), 0.005, rng),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_client_that_can_be_run_needs_no_declaration(name: str) -> None:
    model, defence = network(), BROKEN[name]

    def client(batch: Batch, rng: Generator) -> Params:
        return defence(gradient_of(model, batch), rng)

    hits = 0
    for j in range(0, MANY, 2):
        seen = observed(model, client(at(j), seeded(100 + j)), client=client)
        hits += choice(Candidates().reconstruct(seen, seeded(j))) == [j]
    assert hits >= 4


def test_what_is_missing_is_said_in_one_line() -> None:
    model = network()
    seen = observed(model, gradient_of(model, at(0)))
    with pytest.raises(AttackError, match="needs a list of examples"):
        Candidates().reconstruct(replace(seen, candidates=None), seeded())
    with pytest.raises(AttackError, match="label of every candidate"):
        Candidates().reconstruct(replace(seen, candidates=Batch(LISTED.inputs, LISTED.labels - 2)), seeded())
    with pytest.raises(AttackError, match="of 3 examples, and 0 others are given: it must be 2"):
        Candidates().reconstruct(replace(seen, update=replace(seen.update, num_examples=3)), seeded())


def test_the_order_of_batches_that_nobody_knows_does_not_hide_the_record() -> None:
    model = network()
    plan = Update({}, num_examples=3, num_steps=3, lr=1.0, batch_size=1)

    def client(batch: Batch, rng: Generator) -> Params:
        order, y = torch.randperm(3, generator=rng), F.one_hot(batch.labels, CLASSES).float()
        start = {n: p.clone().requires_grad_() for n, p in parameters(model).items()}
        sent = unroll(partial(step_gradient_of, model), start, batch.inputs[order], y[order], plan)
        return {n: g.detach() for n, g in sent.items()}

    for j in (0, 4, 9):
        sent = client(at(j, 2, 3), seeded(50 + j))
        seen = replace(observed(model, {}), update=replace(plan, gradient=sent), others=at(2, 3), client=client)
        found = Candidates().reconstruct(seen, seeded(j))
        assert choice(found) == [j]
        assert found.details["margin"] > 40
