"""PRECODE: random in train mode, its mean in eval mode, and read off all the same."""

import pytest
import torch
from torch import Generator
from torch.nn import functional as F

from gradveil.attacks.base import build as build_attack
from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.models import build
from gradveil.protection.defense import NoDefense
from gradveil.types import Batch, Observation, Update

SPEC = "precode:strides=2/1,width=8,size=16"


def test_it_draws_from_the_gaussian_of_the_encoder() -> None:
    model, x = build(SPEC, (1, 8, 8), 5), torch.rand(2, 1, 8, 8)
    r = model[:5](x)
    statistics = r @ model.encoder.weight.T + model.encoder.bias
    torch.manual_seed(3)
    noise = torch.randn(2, 16)
    sample = statistics[:, :16] + torch.log1p(statistics[:, 16:].exp()) * noise
    torch.manual_seed(3)
    torch.testing.assert_close(model(x), model.fc(model.decoder(sample)))
    torch.testing.assert_close(model.eval()(x), model.fc(model.decoder(statistics[:, :16])))


def test_the_encoders_own_gradient_gives_the_image(rng: Generator) -> None:
    model = build(SPEC, (1, 8, 8), 5)
    one = Batch(torch.rand(1, 1, 8, 8, generator=rng), torch.tensor([3]))
    first, again = (step_gradient(model, one, NoDefense(), rng) for _ in range(2))
    assert not torch.allclose(first["fc.weight"], again["fc.weight"])
    seen = Observation(model, Update(first), (1, 8, 8), 5)
    found = build_attack("analytic").reconstruct(seen, rng)
    assert float(F.mse_loss(found.inputs, one.inputs)) < 1e-6


def test_a_bottleneck_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="from 1"):
        build("precode:size=0")
