"""Attacks as objects: called with a model, an update and what examples are like; panels from what each declares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_type_hints

import pytest
import torch
from torch import Generator, nn

import gradveil
from gradveil import Batch, Observation, Reconstruction, Update, attacks
from gradveil.attacks.base import ATTACKS, AppliesTo, Attack, ServerKnows, default_panel, is_made_for, seen_like
from gradveil.attacks.newton import Newton
from gradveil.data import Dataset
from gradveil.modalities import IMAGE
from gradveil.modalities.table import Column, Table
from gradveil.modalities.tokens import Tokens
from gradveil.models import build
from gradveil.step_rule import StepRule


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return gradveil.dataset("digits")


@pytest.fixture(scope="module")
def network(digits: Dataset) -> nn.Module:
    return gradveil.model("lenet:activation=tanh,init=kaiming", digits.input_shape, digits.num_classes)


@pytest.fixture(scope="module")
def update(digits: Dataset, network: nn.Module) -> Update:
    return gradveil.local_update(network, digits.train.batch(slice(0, 1)), "none", 0.1, Generator().manual_seed(0))


def test_an_attack_is_called_with_a_model_an_update_and_a_data_set(
    digits: Dataset, network: nn.Module, update: Update
) -> None:
    truth = digits.train.batch(slice(0, 1))
    found = attacks.Newton(steps=40)(network, update, like=digits)
    assert float((found.inputs - truth.inputs).square().mean()) < 1e-6
    assert found.labels is not None
    assert found.labels.tolist() == truth.labels.tolist()


def test_the_call_is_the_observation_that_it_stands_for(digits: Dataset, network: nn.Module, update: Update) -> None:
    seen, attack = seen_like(network, update, digits, noise={"fc.weight": 0.5}), attacks.GS(steps=5)
    by_call = attack(network, update, digits, seed=3, noise={"fc.weight": 0.5})
    assert torch.equal(by_call.inputs, attack.reconstruct(seen, Generator().manual_seed(3)).inputs)
    assert not torch.equal(by_call.inputs, attack(network, update, digits, seed=4).inputs)
    assert (seen.input_shape, seen.num_classes, seen.noise) == ((1, 8, 8), 10, {"fc.weight": 0.5})
    assert seen.prior is not None
    assert seen.public is not None
    held = {image.numpy().tobytes() for image in digits.test.batch().inputs}
    assert all(image.numpy().tobytes() in held for image in seen.public.inputs)  # none of a client's


def test_a_batch_of_public_examples_says_what_they_are_like(
    digits: Dataset, network: nn.Module, update: Update
) -> None:
    seen = seen_like(network, update, digits.test.batch(slice(0, 50)))
    assert (seen.input_shape, seen.num_classes, seen.modality) == ((1, 8, 8), 10, IMAGE)
    one = seen_like(network, update, digits.test.batch(slice(0, 1)), labels=torch.tensor([0]))
    assert one.prior is None  # there is nothing to fit
    assert one.labels is not None


def test_what_a_server_may_know_is_what_an_observation_has() -> None:
    """The keywords of a call complete, and none is missing or made up."""
    given = {"model", "update", "input_shape", "num_classes", "loss", "public", "modality", "simulate_on"}
    assert set(get_type_hints(ServerKnows)) == set(get_type_hints(Observation)) - given


def test_a_name_that_is_no_attack_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Newtons'"):
        attacks.Newtons  # noqa: B018
    assert attacks.Newton is Newton


@pytest.fixture
def shade() -> Iterator[type[Attack]]:
    @ATTACKS.register("shade")
    @dataclass(frozen=True)
    class Shade(Attack):
        """Answer the middle of the range."""

        kind = "closed form"
        applies_to = (AppliesTo(("table",), examples=(2, 4), default="level=0.4"),)
        level: float = 0.5

        def reconstruct_many(self, seen: Sequence[Observation], rngs: Sequence[Generator]) -> list[Reconstruction]:
            return [Reconstruction(torch.full((1, *s.input_shape), self.level), None, 0.0, True) for s in seen]

    yield Shade
    del ATTACKS._classes["shade"]


def test_one_file_puts_an_attack_into_the_panels_of_what_it_declares(shade: type[Attack]) -> None:
    rows, model = Table((Column("age"), Column("size"))), nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 2))
    two, one, five = (Update({}, num_examples=n) for n in (2, 1, 5))
    assert "shade:level=0.4" in default_panel(model, two, rows)
    for client, kind in (
        (one, rows),
        (five, rows),
        (two, IMAGE),
        (replace(two, rule=StepRule(optimizer="adam")), rows),
    ):
        assert not any(spec.startswith("shade") for spec in default_panel(model, client, kind))
    assert is_made_for("shade:level=0.1", rows)
    assert not is_made_for("shade", IMAGE)


def test_tables_and_text_have_panels_of_their_own() -> None:
    rows = Table((Column("age"), Column("size")))
    model = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 2))
    panel = default_panel(model, Update({}), rows)
    assert [spec.partition(":")[0] for spec in panel] == ["analytic", "rowwise", "tableak", "newton", "dlg"]
    text = build("gpt_tiny:width=32,heads=2", (6,), 20)
    assert default_panel(text, Update({}), Tokens(("a", "b"))) == ("span", "words", "tag:steps=100")
    assert [name for name in ATTACKS.names() if is_made_for(name, Tokens(("a", "b")))] == [
        "candidates", "span", "tag", "words",
    ]  # fmt: skip


def test_a_batch_keeps_its_type(digits: Dataset) -> None:
    assert isinstance(digits.test.sample(2, Generator()), Batch)  # what ``like`` asks of a split
