"""Can any image have this representation? The verdict, the least residual, and the radius along r′ - r."""

from math import inf

import pytest
import torch
from torch import nn

from gradveil.representation.certify import certify, invert
from gradveil.representation.problem import Problem
from gradveil.types import Batch


def test_a_sigmoid_never_reaches_zero_so_no_image_has_a_zeroed_entry(model: nn.Module, batch: Batch) -> None:
    r = model[:-1](batch.inputs).detach()
    r[:, :20] = 0
    found = certify(model, None, batch.inputs, r, 2, "reach")
    assert found.details["unreachable"].tolist() == [1.0, 1.0, 1.0]
    assert found.bound.tolist() == [inf, inf, inf]
    assert (found.details["least_residual"] > 0.1).all()


@pytest.mark.parametrize("p", [1, 2, inf])
def test_the_least_residual_is_below_what_a_search_over_images_reaches(
    p: float, model: nn.Module, batch: Batch
) -> None:
    r = model[:-1](batch.inputs).detach()
    r[:, :20] = 0
    found = certify(model, None, batch.inputs, r, p, "reach")
    problem = Problem.make(model, None, batch.inputs, r, p)
    answer, _ = invert(problem, steps=200)
    residual = torch.linalg.vector_norm(model[:-1](answer).detach() - r, p, dim=1)
    assert (found.details["least_residual"] <= residual).all()
    assert (found.details["least_residual"] >= 0.2 * residual).all()


def test_an_allowance_turns_the_verdict_into_a_radius(model: nn.Module, batch: Batch) -> None:
    r = model[:-1](batch.inputs).detach()
    r[:, :20] = 0
    gap = certify(model, None, batch.inputs, r, 2, "global").details["distance"]
    loose = certify(model, None, batch.inputs, r, 2, "reach", residual=0.9999 * gap)
    assert (loose.bound < inf).all()
    assert (loose.bound > 0).all()
    none = certify(model, None, batch.inputs, r, 2, "reach", residual=1.01 * gap)
    assert none.bound.abs().max() == 0  # the truth itself leaves that residual


def test_the_image_itself_is_always_reachable_at_distance_zero(model: nn.Module, batch: Batch) -> None:
    r = model.double()[:-1](batch.inputs.double()).detach()
    found = certify(model, None, batch.inputs.double(), r, 2, "reach")
    assert found.details["unreachable"].max() == 0
    assert found.bound.max() < 1e-6


def test_the_radius_beats_the_lipschitz_bound_in_the_inf_norm(model: nn.Module, batch: Batch) -> None:
    relu = nn.Sequential(*[nn.ReLU() if isinstance(m, nn.Sigmoid) else m for m in model])
    r = relu[:-1](batch.inputs).detach()
    r[:, ::3] = 0
    reach = certify(relu, None, batch.inputs, r, inf, "reach")
    box = certify(relu, None, batch.inputs, r, inf, "box")
    assert (reach.bound > 2 * box.bound).all()
