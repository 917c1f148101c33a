"""DP-SGD: what Opacus' optimizer makes of the same records with the same noise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn

from gradveil.errors import SpecError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.records import SLACK
from gradveil.types import Batch


def test_it_is_a_step_of_opacus(model: nn.Module, batch: Batch) -> None:
    opacus = pytest.importorskip("opacus")
    defense = build(f"dp_sgd:noise=0.7,clip={0.05 * (1 + SLACK)}")
    found = step_gradient(model, batch, defense, Generator().manual_seed(5), slots=4)

    wrapped = opacus.GradSampleModule(copy.deepcopy(model))
    plain = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    private = opacus.optimizers.DPOptimizer(
        plain,
        noise_multiplier=0.7 * (1 + SLACK),
        max_grad_norm=0.05,
        expected_batch_size=4,
        generator=Generator().manual_seed(5),
    )
    F.cross_entropy(wrapped(batch.inputs.clone().requires_grad_()), batch.labels).backward()
    private.pre_step()
    for name, p in wrapped._module.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


def test_it_is_veil_with_noise_alike_in_all_directions(model: nn.Module, batch: Batch) -> None:
    both = [
        step_gradient(model, batch, build(spec), Generator().manual_seed(5))
        for spec in ("dp_sgd:noise=0.3,clip=2", "veil:z=0.3,clip=2")
    ]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    assert build("dp_sgd:noise=2").cost(3) == 0.75


@pytest.mark.parametrize("spec", ["dp_sgd:noise=0", "dp_sgd:clip=-1"])
def test_no_noise_and_no_clip_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="above 0"):
        build(spec)
