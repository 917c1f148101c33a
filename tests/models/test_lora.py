"""Low-rank factors: what they freeze, and that they change nothing at first; what a vision transformer begins with."""

import pytest
import torch
from torch import nn

from gradveil.models import build
from gradveil.models.base import LowRank

SMALL = {
    "vit_tiny:depth=1,width=16,heads=2": ((1, 8, 8), 5),
    "gpt_tiny:depth=1,width=16,heads=2": ((6,), 20),
    "bert_tiny:depth=1,width=16,heads=2,vocabulary=20": ((6,), 5),
}


@pytest.mark.parametrize("spec", SMALL)
def test_the_factors_and_the_last_layer_alone_are_trained(spec: str) -> None:
    shape, classes = SMALL[spec]
    model = build(f"{spec},lora=3", shape, classes, seed=1)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "fc.weight", "fc.bias", *(n for n, _ in model.named_parameters() if n.endswith(("lora_a", "lora_b")))
    }  # fmt: skip
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_submodule("fc")]
    assert layers
    assert all(isinstance(m, LowRank) and m.lora_a.shape[0] == 3 for m in layers)


@pytest.mark.parametrize("spec", SMALL)
def test_at_first_they_change_nothing(spec: str) -> None:
    shape, classes = SMALL[spec]
    x = torch.randint(3, 20, (2, *shape), generator=torch.Generator().manual_seed(0)).float() / (
        20 if len(shape) > 1 else 1
    )
    plain, adapted = (build(f"{spec},lora={rank}", shape, classes, seed=1) for rank in (0, 3))
    assert torch.equal(plain(x), adapted(x))


def test_class_token_and_positions_of_a_vision_transformer_are_drawn() -> None:
    model = build("vit_tiny:depth=1,width=16,heads=2", (1, 8, 8), 5, seed=1)
    for name in ("tokens.class_token", "tokens.positions"):
        assert 0.005 < float(model.get_parameter(name).detach().std()) < 0.05
