"""The check of incoming weights: it finds all that is planted, and no fault with honest training."""

import copy

import pytest
import torch
from torch import Generator, nn

import gradveil
from gradveil.attacks.base import Malicious, build
from gradveil.auditing.incoming import check_model
from gradveil.data import load
from gradveil.data.partition import partition
from gradveil.errors import AttackError, SpecError
from gradveil.federated.settings import Training
from gradveil.federated.simulate import simulate
from gradveil.models import MODELS
from gradveil.models import build as build_model
from gradveil.seeds import Seeds
from gradveil.tree import Params

SHAPE, CLASSES = (1, 8, 8), 10
DIGITS = load("digits")
PUBLIC = DIGITS.test.sample(300, torch.Generator().manual_seed(1))
OWN = DIGITS.train.batch(range(10))
NETWORKS = ("lenet", "perceptron", "resnet18:width=4", "vit_tiny:depth=1")
SMALLER = {
    "resnet18": "resnet18:width=4",
}


def rng() -> Generator:
    return torch.Generator().manual_seed(0)


def network(name: str, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> nn.Module:
    if name != "perceptron":
        return build_model(name, shape, CLASSES, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def state(model: nn.Module) -> Params:
    return {name: value.clone() for name, value in model.state_dict().items()}


def kinds(*args: Params, **more: object) -> set[str]:
    return {finding.kind for finding in check_model(*args, **more).findings}  # type: ignore[arg-type]


PLANTED = {
    "imprint": "parallel rows",
    "imprint:architecture=kept": "parallel rows",
    "trap": "trap weights",
    "trap:architecture=changed": "trap weights",
    "fishing": "last layer",
    "fishing:examples=64": "last layer",
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("spec", PLANTED)
def test_what_is_planted_is_found(name: str, spec: str) -> None:
    honest, attack = network(name), build(spec)
    assert isinstance(attack, Malicious)
    try:
        planted = attack.plant(honest, SHAPE, CLASSES, PUBLIC, rng())
    except AttackError:
        assert "kept" in spec or spec == "trap"
        return
    sent, changed = state(planted), len(state(planted)) != len(state(honest))
    assert PLANTED[spec] in kinds(sent)  # by the weights themselves
    assert ("architecture" if changed else "jump") in kinds(state(honest), sent)
    assert ("architecture" in kinds(sent, model=honest)) == changed
    if spec == "fishing":
        assert "silent errors" in kinds(sent, model=honest, batch=OWN)


@pytest.mark.parametrize("name", [name for name, builder in MODELS if builder.takes == "image"])
def test_an_untrained_model_is_no_suspect(name: str) -> None:
    shape = (1, 28, 28) if name in ("convnet", "leaknet") else SHAPE
    for seed in range(2):
        model = network(SMALLER.get(name, name), seed, shape)
        own = OWN if shape == SHAPE else None
        assert not check_model(state(model), model=model, batch=own).findings


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("perceptron", {"lr": 0.2}),
        ("perceptron", {"lr": 0.1, "momentum": 0.9}),
        ("perceptron", {"lr": 0.01, "optimizer": "adam"}),
        ("logistic", {"lr": 0.02, "optimizer": "adam"}),  # whose small weights training soon outgrows
        ("logistic:init=zeros", {"lr": 0.5}),
        ("lenet:activation=relu,init=kaiming", {"lr": 0.2}),
    ],
)
def test_honest_rounds_are_no_suspects(name: str, settings: dict[str, object]) -> None:
    for seed in range(2):
        model, seeds = network(name, seed), Seeds(seed)
        clients = partition(DIGITS.train.labels, "iid:devices=10", seeds("partition"))
        training = Training(rounds=3, clients=2, batch_size=8, epochs=2, **settings)  # type: ignore[arg-type]
        before = state(model)
        for done in simulate(model, DIGITS, clients, training, "none", seeds):
            after = state(done.model)
            assert not check_model(before, after, model=model, batch=OWN).findings
            before = after


@pytest.mark.parametrize(("logits", "found"), [(20.0, {"last layer"}), (-20.0, {"last layer"}), (10.0, set())])
def test_a_class_that_is_held_for_impossible_or_certain_is_found(logits: float, found: set[str]) -> None:
    sent = state(network("perceptron"))
    sent["3.bias"][4] += logits
    assert kinds(sent) == found


def test_names_and_shapes_and_values_that_do_not_belong_are_found() -> None:
    honest = network("perceptron")
    sent = state(honest)
    sent["extra.weight"] = sent.pop("3.weight")
    sent["1.bias"] = sent["1.bias"][:5]
    sent["1.weight"][0, 0] = torch.nan
    found = check_model(sent, model=honest)
    said = {finding.where: finding.text for finding in found.findings}
    assert said["extra.weight"] == "extra.weight is new: there is no such tensor in the model that is expected."
    assert "is missing" in said["3.weight"]
    assert "(5,) and (128,)" in said["1.bias"]
    assert "NaN" in said["1.weight"]


def test_the_check_leaves_the_model_as_it_was_and_says_what_it_was_held_against() -> None:
    honest = network("lenet")
    before = copy.deepcopy(state(honest))
    other = {name: 1.01 * value for name, value in before.items()}
    found = gradveil.check_model(before, other, model=honest, batch=OWN)
    assert not found.suspicious
    assert found.compared == (
        "themselves", "the weights before", "the model that is expected", "what they do to own examples",
    )  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in honest.state_dict().items())


def test_examples_without_a_model_and_a_model_without_a_shape_are_refused() -> None:
    with pytest.raises(SpecError, match="their model is needed"):
        check_model(state(network("lenet")), batch=OWN)
    with pytest.raises(SpecError, match="input shape"):
        check_model(state(network("lenet")), model="lenet")
