"""Every defence on a model of rows: it runs, or says in one line that it cannot and what can."""

import copy

import pytest
import torch

from gradveil.data import load
from gradveil.data.base import Dataset
from gradveil.errors import DefenseError
from gradveil.federated.client import train_client
from gradveil.federated.settings import Local
from gradveil.models import build
from gradveil.protection.defense import DEFENSES
from gradveil.protection.defense import build as build_defense
from gradveil.threats.setup import for_client

OF_PICTURES = ("ats",)
IDLE = ("none", "compose", "representation_authors")  # of nothing; and that rule does nothing where ReLU leaves 0 / 0


@pytest.fixture(scope="module")
def patients() -> Dataset:
    return load("made_up_patients:rows=200")


@pytest.mark.parametrize("name", DEFENSES.names())
def test_a_defence_protects_rows_or_names_another(name: str, patients: Dataset) -> None:
    model = build("mlp", patients.input_shape, 2, 0, patients.modality)
    held, rng = patients.train.batch(slice(0, 4)), torch.Generator().manual_seed(1)
    defense = for_client(build_defense(name), model, patients.test.batch(), "cross_entropy")
    if name in OF_PICTURES:
        with pytest.raises(DefenseError, match=r"transforms images .* Use veil, gaussian or pruning\.$"):
            train_client(copy.deepcopy(model), held, defense, 0.1, rng, Local(batch_size=2))
        return
    sent = train_client(copy.deepcopy(model), held, defense, 0.1, rng, Local(batch_size=2)).whole.gradient
    plain = train_client(
        copy.deepcopy(model), held, build_defense("none"), 0.1, torch.Generator().manual_seed(1), Local(batch_size=2)
    ).whole.gradient
    assert all(bool(g.isfinite().all()) for g in sent.values())
    changed = any(not torch.equal(sent[n], plain[n]) for n in plain)
    assert changed == (name not in IDLE)
