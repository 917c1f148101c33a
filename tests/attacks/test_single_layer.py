"""A model that is one layer by itself: its parameters are called weight and bias, and it has no path."""

import pytest
import torch
from torch import nn

from attacks.helpers_attacks import CLASSES, observe, rng
from gradveil.attacks.base import build
from gradveil.errors import AttackError
from gradveil.types import Batch


def bare() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(8, CLASSES)


DATA = Batch(torch.rand(1, 8, generator=rng()), torch.tensor([2]))


@pytest.mark.parametrize("spec", ["analytic", "idlg", "newton", "dlg:steps=20"])
def test_a_layer_by_itself_is_attacked_as_in_a_chain(spec: str) -> None:
    found = build(spec).reconstruct(observe(bare(), DATA), rng())
    assert float((found.inputs - DATA.inputs).square().mean()) < 1e-6
    assert found.labels is not None
    assert found.labels.tolist() == [2]


def test_fishing_says_why_it_does_not_fit() -> None:
    with pytest.raises(AttackError, match="no weights before its last layer"):
        build("fishing").reconstruct(observe(bare(), DATA), rng())
