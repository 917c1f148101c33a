"""Malicious servers: what they plant gives examples away, and otherwise the model works as it did."""

import copy

import pytest
import torch
from torch import Generator, Tensor, nn

from gradveil import tree
from gradveil.attacks.base import Malicious, build
from gradveil.data import load
from gradveil.errors import AttackError
from gradveil.federated.client import step_gradient
from gradveil.metrics import measure
from gradveil.models import build as build_model
from gradveil.protection.defense import NoDefense
from gradveil.protection.defense import build as build_defense
from gradveil.threats.trial import observe
from gradveil.types import Batch, GaussianPrior, Observation, Reconstruction, Update

SHAPE, CLASSES = (1, 8, 8), 10
DIGITS = load("digits")
PUBLIC = DIGITS.test.sample(300, torch.Generator().manual_seed(1))
PRIOR = GaussianPrior.fit(PUBLIC.inputs)


def rng(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def perceptron(width: int = 256) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, CLASSES))


def malicious(spec: str) -> Malicious:
    attack = build(spec)
    assert isinstance(attack, Malicious)
    return attack


def plant(spec: str, model: nn.Module) -> nn.Module:
    return malicious(spec).plant(model, SHAPE, CLASSES, PUBLIC, rng())


def attacked(spec: str, model: nn.Module, batch: Batch, defense: str = "none") -> Reconstruction:
    seen = observe(plant(spec, model), batch, build_defense(defense), rng(1), CLASSES, PRIOR)
    return build(spec).reconstruct(seen, rng(2))


def recovered(found: Reconstruction, batch: Batch) -> float:
    return float((measure(found.inputs, None, batch)[0]["mse"] < 1e-4).float().mean())


@pytest.mark.parametrize(
    ("spec", "model", "count"),
    [
        ("imprint", "lenet", 64),
        ("imprint", "lenet", 1),
        ("imprint", "resnet18:width=4", 64),
        ("imprint", "vit_tiny:depth=1", 64),
        ("imprint:architecture=kept", "perceptron", 32),
        ("trap", "perceptron", 8),
        ("trap:architecture=changed", "lenet", 8),
    ],
)
def test_what_is_planted_gives_nearly_every_example_of_a_batch_away(spec: str, model: str, count: int) -> None:
    honest = perceptron() if model == "perceptron" else build_model(model, SHAPE, CLASSES)
    batch = DIGITS.train.sample(count, rng(7))
    assert recovered(attacked(spec, honest, batch), batch) >= 0.9


def test_several_directions_find_examples_that_share_a_bin_in_each_of_them() -> None:
    batch = DIGITS.train.sample(200, rng(7))
    one, four = (attacked(f"imprint:directions={n}", build_model("lenet", SHAPE, CLASSES), batch) for n in (1, 4))
    assert recovered(one, batch) < 0.9
    assert recovered(four, batch) > 0.95
    assert four.details["certain"] > 0.95 * len(batch)


def test_an_imprint_is_read_through_the_sum_over_clients() -> None:
    planted = plant("imprint", build_model("lenet", SHAPE, CLASSES))
    batches = [DIGITS.train.sample(16, rng(seed)) for seed in range(4)]
    total: dict[str, Tensor] = {}
    for batch in batches:
        gradient = step_gradient(planted, batch, NoDefense(), rng())
        total = tree.add(total, gradient) if total else gradient
    found = build("imprint").reconstruct(Observation(planted, Update(total, 64), SHAPE, CLASSES), rng())
    everybody = Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches]))
    assert recovered(found, everybody) >= 0.9


def test_a_sum_over_clients_with_rows_of_their_own_says_whose_an_example_is() -> None:
    spec, honest, sizes = "imprint:rows=1024,clients=4", build_model("lenet", SHAPE, CLASSES), (16, 8, 24, 16)
    batches = [DIGITS.train.sample(count, rng(seed)) for seed, count in enumerate(sizes)]
    models = [plant(f"{spec},client={k}", honest) for k in range(4)]
    total: dict[str, Tensor] = {}
    for k, (model, batch) in enumerate(zip(models, batches, strict=True)):
        gradient = step_gradient(model, batch, NoDefense(), rng())
        own = gradient["planted.rows.bias"].reshape(4, 256).any(1)  # no row of another client is touched
        assert own.tolist() == [j == k for j in range(4)]
        total = tree.add(total, gradient) if total else gradient
    found = build(f"{spec},client=2").reconstruct(Observation(models[2], Update(total, 64), SHAPE, CLASSES), rng())
    whose = [int(found.details[f"of client {k}"]) for k in range(4)]
    for batch, mine in zip(batches, found.inputs.split(whose), strict=True):
        apart = torch.cdist(batch.inputs.flatten(1), mine.flatten(1)).amin(1)
        assert float((apart < 0.05).float().mean()) >= 0.9  # its examples are among what is said to be its own


@pytest.mark.parametrize(("defense", "stops"), [("representation:share=0.4", False), ("pruning:share=0.8", True)])
def test_a_defence_of_the_last_layer_does_not_stop_an_imprint(defense: str, stops: bool) -> None:
    batch = DIGITS.train.sample(8, rng(7))
    share = recovered(attacked("imprint:rows=128", build_model("lenet", SHAPE, CLASSES), batch, defense), batch)
    assert share == (0.0 if stops else 1.0)


@pytest.mark.parametrize(
    ("spec", "model"),
    [("imprint", "resnet18:width=4"), ("trap", "perceptron"), ("fishing:target=5,attack=analytic", "perceptron")],
)
def test_noise_of_a_fixed_size_is_small_beside_gradients_that_were_made_large(spec: str, model: str) -> None:
    honest = perceptron() if model == "perceptron" else build_model(model, SHAPE, CLASSES)
    batch, join = one_of_each(), "," if ":" in spec else ":"
    weak, strong = (attacked(f"{spec}{join}gain={gain}", honest, batch, "gaussian:scale=0.01") for gain in (1, 1e6))
    assert recovered(weak, batch) == 0
    assert recovered(strong, batch) >= (1 / 8 if spec.startswith("fishing") else 0.7)


SPECS = (
    "imprint",
    "imprint:architecture=kept",
    "imprint:clients=4,client=3",
    "trap",
    "trap:architecture=changed",
    "fishing",
)


@pytest.mark.parametrize("spec", SPECS)
def test_a_planted_model_is_a_copy_that_works_as_the_honest_one_does(spec: str) -> None:
    honest = perceptron()
    honest.eval()
    honest[3].train()  # a mode of its own
    before = copy.deepcopy(honest.state_dict())
    planted = plant(spec, honest)
    assert planted is not honest
    assert all(torch.equal(v, before[n]) for n, v in honest.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in planted.parameters())
    assert [planted.get_submodule(n).training for n in ("", "1", "3")] == [False, False, True]
    assert set(honest.state_dict()) <= set(planted.state_dict())
    again = copy.deepcopy(planted)
    again.load_state_dict(planted.state_dict())
    x = DIGITS.train.batch(range(3)).inputs
    assert torch.equal(again(x), planted(x))
    assert not torch.equal(planted(x), honest(x))
    assert torch.equal(plant(spec, honest)(x), planted(x))  # from the generator alone


@pytest.mark.parametrize("spec", SPECS)
def test_an_update_of_the_honest_model_is_refused(spec: str) -> None:
    seen = observe(perceptron(), DIGITS.train.sample(2, rng()), NoDefense(), rng(), CLASSES)
    with pytest.raises(AttackError, match=r"plant\(\)"):
        build(spec).reconstruct(seen, rng())


@pytest.mark.parametrize(
    ("spec", "model", "words"),
    [
        ("imprint:architecture=kept", "lenet", "does not begin with two fully connected layers"),
        ("trap", "lenet", "does not begin with two fully connected layers"),
        ("fishing:target=11", "lenet", "not two public examples of class 11"),
    ],
)
def test_where_nothing_can_be_planted_it_is_refused(spec: str, model: str, words: str) -> None:
    with pytest.raises(AttackError, match=words):
        plant(spec, build_model(model, SHAPE, CLASSES))


@pytest.mark.parametrize("spec", SPECS)
def test_without_public_examples_nothing_is_planted(spec: str) -> None:
    with pytest.raises(AttackError, match="public examples"):
        malicious(spec).plant(perceptron(), SHAPE, CLASSES, None, rng())


def one_of_each(first: int = 3) -> Batch:
    labels = DIGITS.train.labels
    return DIGITS.train.batch([int((labels == c).nonzero()[first]) for c in range(8)])


@pytest.mark.parametrize("model", ["lenet:strides=2/1", "perceptron"])
def test_fishing_gets_the_one_example_of_a_class_out_of_a_batch(model: str) -> None:
    honest = perceptron(64) if model == "perceptron" else build_model(model, SHAPE, CLASSES)
    batch = one_of_each()
    found = attacked("fishing:target=5", honest, batch)
    errors = measure(found.inputs, None, batch)[0]["mse"]
    assert float(errors[5]) < 1e-6
    assert float(errors[torch.arange(8) != 5].min()) > 1e-3  # the others are not it
    assert found.details["fished"] == pytest.approx(1.0, abs=1e-3)


def test_only_the_fished_example_sends_a_gradient_past_the_last_layer() -> None:
    planted = plant("fishing:target=5", perceptron(64))
    batch = one_of_each()
    whole = step_gradient(planted, batch, NoDefense(), rng())
    alone = step_gradient(planted, batch[5:6], NoDefense(), rng())
    for name in ("1.weight", "1.bias"):
        torch.testing.assert_close(8 * whole[name], alone[name], rtol=1e-4, atol=1e-6)


def test_several_of_a_class_are_caught_together_and_one_is_told_from_the_others() -> None:
    batch = DIGITS.train.sample(32, rng(64))
    there = batch.labels.bincount().tolist()
    assert there[:4] == [6, 2, 2, 4]
    for target in range(4):
        found = attacked(f"fishing:target={target},examples=32,attack=analytic", perceptron(512), batch)
        assert found.details["fished"] == pytest.approx(there[target], abs=1e-3)
        errors = measure(found.inputs[: there[target]], None, batch[batch.labels == target])[0]["mse"]
        assert float(errors.min()) < 1e-6


def test_where_more_of_a_class_are_expected_than_a_small_batch_most_are_held_back() -> None:
    batch = DIGITS.train.sample(256, rng(64))
    there = batch.labels.bincount().tolist()
    for target in range(4):
        spec = f"fishing:target={target},examples=256,attack=analytic"
        assert 0.5 < attacked(spec, perceptron(64), batch).details["fished"] < 0.7 * there[target]


def test_fishing_is_after_the_example_that_sends_most_through_the_last_layer() -> None:
    attack = malicious("fishing:target=5")
    assert attack.after(plant("fishing:target=5", perceptron(64)), one_of_each()) == 5
    assert malicious("imprint").after(plant("imprint", perceptron(64)), one_of_each()) is None


def test_where_the_class_is_not_there_nothing_is_fished() -> None:
    found = attacked("fishing:target=9", perceptron(64), one_of_each())
    assert not found.converged
    assert found.inputs.unique().tolist() == [0.5]


def test_fishing_is_after_the_rarest_class_that_an_honest_update_shows() -> None:
    labels = DIGITS.train.labels
    picked = [int((labels == c).nonzero()[i]) for c, i in ((3, 0), (3, 1), (7, 0), (4, 0), (4, 1))]
    seen = observe(perceptron(64), DIGITS.train.batch(picked), NoDefense(), rng(1), CLASSES)
    assert malicious("fishing").for_client(seen, rng()) == build("fishing:target=7")
    assert malicious("fishing:target=2").for_client(seen, rng()) == build("fishing:target=2")
    twice = observe(perceptron(64), DIGITS.train.batch(picked[:2]), NoDefense(), rng(1), CLASSES)
    assert malicious("fishing").for_client(twice, rng()) == build("fishing:target=3,examples=2")
    assert malicious("imprint").for_client(seen, rng()) == build("imprint")
