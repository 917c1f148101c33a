"""Defences as objects: what a person at a prompt gets."""

import pytest
import torch.nn.functional as F
from torch import nn, optim

import gradveil
from gradveil import defenses
from gradveil.errors import SpecError
from gradveil.protection.defense import DEFENSES, build
from gradveil.registry import describe, settings
from gradveil.types import Batch


def test_each_registered_defence_is_an_attribute_and_has_its_settings_in_its_help() -> None:
    for name, cls in DEFENSES:
        if not cls.__module__.startswith("gradveil.defenses"):
            continue
        assert getattr(defenses, cls.__name__) is cls, name
        assert cls.__name__ in defenses.__all__
        said = cls.__doc__ or ""
        assert "Documented" not in said
        for setting in settings(cls):
            assert f"    {setting.name}: {setting.default!r} by default" in said
    assert "clip: None by default; C: the longest gradient of a record" in (defenses.Veil.__doc__ or "")
    assert "share: 0.4 by default; of the entries" in (defenses.RandomMask.__doc__ or "")  # of the class it is made of


def test_an_object_is_its_spec() -> None:
    assert defenses.Veil(z=1, clip=1) == build("veil:z=1,clip=1")
    assert describe(defenses.Veil(z=1, clip=1)) == "veil:z=1,clip=1"
    assert describe(defenses.Compose((defenses.Pruning(share=0.5), defenses.Qsgd()))) == "pruning:share=0.5+qsgd"
    assert "clip=1" in repr(defenses.Veil(z=1, clip=1))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: defenses.Veil(z=-1), "veil: z=-1: give a number above 0"),
        (lambda: defenses.Veil(tier="cloud"), "veil: tier=cloud: give one of local, aggregate"),
        (lambda: defenses.Pruning(on="row"), "pruning: on=row: give one of gradient, update"),
        (lambda: defenses.RepresentationPerturbation(p=3), "representation: p=3: give one of 1, 2, inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused_when_it_is_made(made: object, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        made()  # type: ignore[operator]


def test_a_model_is_protected_by_an_object(model: nn.Module, batch: Batch) -> None:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with gradveil.protect(model, defenses.Veil(z=1, clip=1)) as guard:
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
    assert guard.report.steps == 1
    assert guard.account.spent == 1.0
