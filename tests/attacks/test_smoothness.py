"""Smoothness from known noise: the weight of the formula, its limits, and what it brings to a server that knows."""

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.base import build
from gradveil.attacks.gs import map_smoothness
from gradveil.attacks.search.matching import Matching, cosine_distance
from gradveil.tree import parameters
from gradveil.types import Observation, Update

SHAPE = (1, 8, 8)
DIFFERENCES = 56  # 8 x 7, the mean of both directions


def smooth_image(rng: Generator) -> Tensor:
    corners = torch.rand(1, 1, 2, 2, generator=rng)
    return nn.functional.interpolate(corners, size=(8, 8), mode="bilinear", align_corners=True)


def noisy(model: nn.Module, x: Tensor, std: dict[str, float] | float, rng: Generator, steps: int = 1) -> Observation:
    """What a server sees that knows the noise and the label."""
    y = torch.tensor([2])
    gradient = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    stds = dict.fromkeys(parameters(model), std) if isinstance(std, float) else std
    sent = {
        n: steps * g + stds.get(n, 0.0) * torch.randn(g.shape, generator=rng)
        for n, g in zip(parameters(model), gradient, strict=True)
    }
    update = Update(sent, num_steps=steps)
    return Observation(model, update, SHAPE, 5, labels=y, noise={n: s for n, s in stds.items() if s > 0})


def test_the_weight_is_that_of_the_posterior(network: nn.Module, rng: Generator) -> None:
    seen = noisy(network, smooth_image(rng), 0.02, rng)
    energy = sum(float(g.square().sum()) for g in seen.update.gradient.values())
    signal = energy - 0.02**2 * sum(g.numel() for g in seen.update.gradient.values())
    assert map_smoothness(seen, 0.05) == pytest.approx(0.02**2 * DIFFERENCES / (0.05 * sqrt(energy * signal)), rel=1e-4)
    assert map_smoothness(seen, 0.1) == pytest.approx(map_smoothness(seen, 0.05) / 2)


@pytest.mark.parametrize("different", [False, True])
def test_cosine_and_posterior_rank_images_alike(different: bool, network: nn.Module, rng: Generator) -> None:
    """Where gradients have the norm of the true one, the change of the posterior is the objective's, times a factor."""
    model = network
    std = {n: 0.02 * (3.0 if different and n.startswith("5") else 1.0) for n in parameters(model)}
    seen = noisy(model, smooth_image(rng), std, rng)
    matching = Matching.of([seen])
    plain = noisy(model, smooth_image(Generator().manual_seed(0)), 0.0, rng).update.gradient
    trial = {n: g[None].expand(2, *g.shape).clone() for n, g in plain.items()}
    for g in trial.values():
        g[1] += 0.3 * g[1].std() * torch.randn(g[1].shape, generator=rng)
    norms = sum(matching.take(torch.tensor([0, 0])).weigh(n, g * g).flatten(1).sum(1) for n, g in trial.items())
    weight = map_smoothness(seen, 0.05)
    signal = float(matching.energy) - float(matching.floor)
    trial = {n: g * (signal / norms).sqrt().view(-1, *([1] * (g.ndim - 1))) for n, g in trial.items()}
    two = matching.take(torch.tensor([0, 0]))
    distance, _ = cosine_distance(two, trial)
    likelihood = sum(((trial[n] - two.target[n]) / std[n]).square().flatten(1).sum(1) / 2 for n in matching.names)
    factor = DIFFERENCES / 0.05 / weight  # of the objective: smoothness counts DIFFERENCES / contrast in the posterior
    assert float(likelihood[1] - likelihood[0]) == pytest.approx(factor * float(distance[1] - distance[0]), rel=0.02)


def test_without_noise_there_is_no_weight_and_with_much_of_it_a_finite_one(network: nn.Module, rng: Generator) -> None:
    model, x = network, smooth_image(rng)
    assert map_smoothness(noisy(model, x, 0.0, rng), 0.05) == 0.0
    weights = [map_smoothness(noisy(model, x, std, rng), 0.05) for std in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    assert weights == sorted(weights)
    assert weights[-1] < 1e4
    less = replace(noisy(model, x, 0.1, rng), noise=dict.fromkeys(parameters(model), 10.0))  # than the noise by itself
    assert 0 < map_smoothness(less, 0.05) < 1e6


def test_entries_that_are_not_matched_do_not_count(network: nn.Module, rng: Generator) -> None:
    seen = noisy(network, smooth_image(rng), 0.05, rng)
    kept = {n: (torch.rand(g.shape, generator=rng) < 0.5).float() for n, g in seen.update.gradient.items()}
    gone = Update({n: g * kept[n] for n, g in seen.update.gradient.items()})
    energy = sum(float(g.square().sum()) for g in gone.gradient.values())
    signal = energy - 0.05**2 * sum(float(k.sum()) for k in kept.values())
    wanted = 0.05**2 * DIFFERENCES / (0.05 * sqrt(energy * signal))
    assert map_smoothness(replace(seen, weights=kept), 0.05) == pytest.approx(wanted, rel=1e-4)


def test_several_steps_count_as_their_mean(network: nn.Module, rng: Generator) -> None:
    model, x = network, smooth_image(rng)
    one = map_smoothness(noisy(model, x, 0.001, Generator().manual_seed(1)), 0.05)
    four = map_smoothness(noisy(model, x, 0.004, Generator().manual_seed(1), steps=4), 0.05)
    assert four == pytest.approx(one, rel=1e-4)


def test_a_server_that_knows_the_noise_gets_closer_to_a_smooth_image(network: nn.Module) -> None:
    rngs = [Generator().manual_seed(seed) for seed in range(3)]
    truth = [smooth_image(rng) for rng in rngs]
    seen = [noisy(network, x, 0.02, rng) for x, rng in zip(truth, rngs, strict=True)]
    errors = {}
    for settings in ("tv=1e-4", "contrast=0.1"):
        starts = [Generator().manual_seed(seed) for seed in range(3)]
        found = build(f"gs:steps=200,{settings}").reconstruct_many(seen, starts)
        errors[settings] = sum(float((f.inputs - x).square().mean()) for f, x in zip(found, truth, strict=True))
    assert errors["contrast=0.1"] < 0.5 * errors["tv=1e-4"], errors


def test_each_update_has_the_weight_of_its_own_noise(network: nn.Module) -> None:
    model, rng = network.double(), Generator().manual_seed(5)
    seen = [noisy(model, smooth_image(rng).double(), std, rng) for std in (0.0, 0.001, 0.05)]
    attack = build("gs:steps=40,contrast=0.1,restarts=2")
    together = attack.reconstruct_many(seen, [Generator().manual_seed(i) for i in range(3)])
    for i, found in enumerate(together):
        (alone,) = attack.reconstruct_many([seen[i]], [Generator().manual_seed(i)])
        assert torch.allclose(found.inputs, alone.inputs, atol=1e-6)
    (plain,) = build("gs:steps=40,restarts=2").reconstruct_many([seen[0]], [Generator().manual_seed(0)])
    assert torch.allclose(together[0].inputs, plain.inputs, atol=1e-6)  # no noise is known of: tv alone
    (blind,) = attack.reconstruct_many([replace(seen[2], noise={})], [Generator().manual_seed(2)])
    assert not torch.allclose(together[2].inputs, blind.inputs, atol=1e-2)
