from math import sqrt

import pytest
import torch
from torch import Generator, nn

from gradveil.protection.defense import build
from gradveil.tree import Params
from gradveil.types import Observation, Update


@pytest.fixture
def gradient() -> Params:
    rng = Generator().manual_seed(7)
    return {"a": 3.0 * torch.randn(200, 100, generator=rng), "b": 0.1 * torch.randn(20000, generator=rng)}


def added(spec: str, gradient: Params, rng: Generator) -> Params:
    noisy = build(spec).on_gradient(gradient, rng)
    return {name: noisy[name] - gradient[name] for name in gradient}


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_the_scale_is_the_standard_deviation_on_every_tensor(name: str, gradient: Params, rng: Generator) -> None:
    for noise in added(f"{name}:scale=0.05", gradient, rng).values():
        assert float(noise.std()) == pytest.approx(0.05, rel=0.02)
        assert abs(float(noise.mean())) < 0.002


def test_the_two_noises_have_the_tails_of_their_names(gradient: Params, rng: Generator) -> None:
    def kurtosis(noise: torch.Tensor) -> float:
        return float((noise**4).mean() / (noise**2).mean() ** 2)

    assert kurtosis(added("gaussian:scale=1", gradient, rng)["b"]) == pytest.approx(3, abs=0.3)
    assert kurtosis(added("laplace:scale=1", gradient, rng)["b"]) == pytest.approx(6, abs=0.9)


def test_relative_noise_is_the_same_on_all_layers_in_units_of_the_whole(gradient: Params, rng: Generator) -> None:
    rms = float(torch.cat([g.flatten() for g in gradient.values()]).square().mean().sqrt())
    for noise in added("gaussian:scale=0.5,relative=true", gradient, rng).values():
        assert float(noise.std()) == pytest.approx(0.5 * rms, rel=0.02)


def test_relative_noise_per_tensor_is_in_units_of_each(gradient: Params, rng: Generator) -> None:
    noise = added("gaussian:scale=0.5,relative=true,per=tensor", gradient, rng)
    assert float(noise["a"].std()) == pytest.approx(1.5, rel=0.02)
    assert float(noise["b"].std()) == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(("on", "expected"), [("gradient", 0.0), ("update", 0.05), ("weights", 0.5)])
def test_noise_on_the_weights_counts_one_over_lr_in_the_update(
    on: str, expected: float, gradient: Params, rng: Generator
) -> None:
    noisy = build(f"gaussian:scale=0.05,on={on}").on_update(Update(gradient, lr=0.1), rng)
    assert float((noisy.gradient["a"] - gradient["a"]).std()) == pytest.approx(expected, rel=0.02)


def test_noise_goes_to_one_place_only(gradient: Params, rng: Generator) -> None:
    assert torch.equal(build("gaussian:on=update").on_gradient(gradient, rng)["a"], gradient["a"])
    assert build("gaussian").acts_on == {"gradient"}
    assert build("laplace:on=weights").acts_on == {"update"}


@pytest.mark.parametrize(
    ("spec", "steps", "lr"),
    [
        ("gaussian:scale=0.2", 1, 0.1),
        ("gaussian:scale=0.2", 4, 0.1),
        ("gaussian:scale=0.2,on=update", 4, 0.1),
        ("laplace:scale=0.02,on=weights", 4, 0.1),
        ("gaussian:scale=1,relative=true", 1, 0.1),
        ("gaussian:scale=1,relative=true", 4, 0.1),
        ("gaussian:scale=1,relative=true,per=tensor", 4, 0.1),
        ("gaussian:scale=1,relative=true,on=update", 4, 0.1),
        ("gaussian:scale=1,relative=true,on=weights", 4, 0.1),
    ],
)
def test_a_server_that_knows_the_settings_knows_the_noise(
    spec: str, steps: int, lr: float, gradient: Params, rng: Generator, model: nn.Module
) -> None:
    defense = build(spec)
    parts = [defense.on_gradient(gradient, rng) for _ in range(steps)]
    clean = {name: steps * g for name, g in gradient.items()}
    update = Update({name: sum(p[name] for p in parts) for name in gradient}, num_steps=steps, lr=lr)  # type: ignore[misc]
    update = defense.on_update(update, rng)
    (counter,) = defense.servers(model)

    known = counter.view(Observation(model, update, (1, 8, 8), 5)).noise

    assert counter.attack == "newton"
    for name, g in clean.items():
        assert known[name] == pytest.approx(float((update.gradient[name] - g).std()), rel=0.03)


def test_the_known_noise_of_one_absolute_step_is_the_scale(gradient: Params, model: nn.Module) -> None:
    (counter,) = build("laplace:scale=0.3").servers(model)
    seen = Observation(model, Update(gradient, num_steps=9), (1, 8, 8), 5)
    assert counter.view(seen).noise == pytest.approx({"a": 0.3 * sqrt(9), "b": 0.3 * sqrt(9)})
