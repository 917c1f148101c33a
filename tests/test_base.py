"""The base nouns: tree arithmetic, seeds, priors, observations, layers."""

import pytest
import torch
from torch import nn

from gradveil import tree, types
from gradveil.countermeasures import drop, mask, whiten
from gradveil.errors import LayerError, UpdateError
from gradveil.modules import find_layer, prefix, representation
from gradveil.seeds import Seeds
from gradveil.types import Batch, GaussianPrior, Observation, Update, check_update


def an_observation(model: nn.Module) -> Observation:
    gradient = {n: torch.ones_like(p) for n, p in tree.parameters(model).items()}
    return Observation(model, Update(gradient), (1, 8, 8), 5)


def test_tree_arithmetic_by_hand() -> None:
    a = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0])}
    b = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([-2.0])}
    assert tree.flatten(tree.add(a, b, 2.0)).tolist() == [7.0, 2.0, -2.0]
    assert tree.flatten(tree.subtract(a, b)).tolist() == [-2.0, 2.0, 4.0]
    assert float(tree.dot(a, b)) == -1.0
    assert float(tree.norm(a)) == 3.0
    assert tree.size(a) == 3
    assert tree.is_finite(a)
    assert not tree.is_finite({"w": torch.tensor([float("nan")])})


def test_seeds_differ_by_name_and_repeat() -> None:
    seeds = Seeds(3)
    assert seeds.number("a", 1) == Seeds(3).number("a", 1)
    assert len({seeds.number("a", 1), seeds.number("a", 2), seeds.number("b", 1), Seeds(4).number("a", 1)}) == 4
    assert torch.equal(torch.rand(3, generator=seeds("x")), torch.rand(3, generator=seeds("x")))


def test_the_prior_whitens_as_its_dense_covariance_does() -> None:
    inputs = torch.rand(30, 1, 2, 3, dtype=torch.float64, generator=Seeds(0)("prior"))
    prior = GaussianPrior.fit(inputs)
    x = torch.rand(4, 6, dtype=torch.float64, generator=Seeds(0)("x"))
    torch.testing.assert_close(prior.whiten(x), torch.linalg.solve(prior.covariance(), x.T).T)
    centred = inputs.flatten(1) - inputs.flatten(1).mean(0)
    expected = centred.T @ centred / 29 + prior.ridge * torch.eye(6)
    torch.testing.assert_close(prior.covariance(), expected)
    white = GaussianPrior.white(torch.zeros(6, dtype=torch.float64), 0.5)
    torch.testing.assert_close(white.whiten(x), x / 0.25)


def test_an_update_from_weights_is_the_sum_of_step_gradients() -> None:
    update = Update.from_weights({"w": torch.tensor([1.0])}, {"w": torch.tensor([0.7])}, 0.1, 2, 3)
    torch.testing.assert_close(update.gradient["w"], torch.tensor([3.0]))


def test_views_of_an_observation(model: nn.Module) -> None:
    seen = an_observation(model)
    assert seen.without("5.*").visible == ("0.weight", "0.bias", "2.weight", "2.bias")
    assert seen.only("5.weight").visible == ("5.weight",)
    assert drop("5.weight").view(seen).visible == ("0.weight", "0.bias", "2.weight", "2.bias", "5.bias")
    with pytest.raises(UpdateError, match="No tensor is left"):
        seen.only("fc*")


def test_a_mask_is_read_off_the_zeros_of_the_named_tensors_only(model: nn.Module) -> None:
    seen = an_observation(model)
    seen.update.gradient["5.weight"][:, 3] = 0
    seen.update.gradient["0.weight"][0] = 0
    view = mask("5.weight").view(seen)
    assert set(view.weights) == {"5.weight"}
    assert view.weights["5.weight"].sum() == seen.update.gradient["5.weight"].numel() - 5
    assert not seen.weights


def test_whitening_adds_the_noise_levels_and_an_attack(model: nn.Module) -> None:
    counter = whiten(lambda seen: {n: 0.1 for n in seen.update.gradient})
    assert counter.view(an_observation(model)).noise["0.bias"] == 0.1
    assert counter.attack == "newton"


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ({"nope": torch.ones(1)}, "'nope' that the model has not"),
        ({"0.bias": torch.ones(5)}, r"is \(5,\) in the update and \(4,\) in the model"),
        ({"0.bias": torch.ones(4, dtype=torch.int64)}, "dtype torch.int64"),
        ({"0.bias": torch.full((4,), float("inf"))}, "NaN or infinite"),
    ],
)
def test_a_malformed_update_is_refused(model: nn.Module, gradient: tree.Params, message: str) -> None:
    with pytest.raises(UpdateError, match=message):
        check_update(Update(gradient), model)


def test_the_last_dense_layer_is_the_default_and_a_wrong_one_is_named(model: nn.Module) -> None:
    assert find_layer(model) == "5"
    assert find_layer(model, "2") == "2"
    with pytest.raises(LayerError, match=r"has no linear or convolutional layer '7'.*It has: 0, 2, 5"):
        find_layer(model, "7")


def test_the_representation_is_the_layers_input(model: nn.Module, batch: Batch) -> None:
    expected = model[:5](batch.inputs)  # type: ignore[index]
    torch.testing.assert_close(representation(model, "5", batch.inputs), expected.detach())


def test_the_prefix_leaves_buffers_hooks_and_random_state_alone(batch: Batch) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(72, 2)).train()
    before = {n: b.clone() for n, b in net.named_buffers()}
    state = torch.get_rng_state()
    first = prefix(net, "4")(batch.inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    torch.testing.assert_close(first, net[:4](batch.inputs))  # the masks that the next real forward pass draws


def test_batch_statistics_are_held_so_samples_do_not_mix(batch: Batch) -> None:
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 2)).train()
    x = batch.inputs.clone().requires_grad_()
    r = prefix(net, "2")(x)
    (grad,) = torch.autograd.grad(r[0].sum(), x)
    assert grad[0].abs().sum() > 0
    assert grad[1:].abs().sum() == 0


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_a_prior_of_many_directions_is_the_same_without_a_whole_decomposition(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 0.7 ** torch.arange(shape[1])
    whole = GaussianPrior.fit(inputs, rank=7)
    monkeypatch.setattr(types, "MANY_DIRECTIONS", 10)
    monkeypatch.setattr(torch.linalg, "svd", None)
    part = GaussianPrior.fit(inputs, rank=7)
    assert part.factor.shape == whole.factor.shape
    torch.testing.assert_close(part.factor.abs(), whole.factor.abs(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(part.covariance(), whole.covariance(), rtol=1e-4, atol=1e-6)
