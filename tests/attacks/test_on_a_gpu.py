"""On CUDA: a step is captured, and goes the way it goes on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks.base import build as build_attack
from gradveil.attacks.search.equations import Prior
from gradveil.attacks.search.gauss_newton import MatrixFree
from gradveil.attacks.search.matching import (
    Matching,
    MatchingObjective,
    TotalVariation,
    Unknowns,
    cosine_distance,
    squared_distance,
)
from gradveil.attacks.search.minimise import LBFGS, Adam, Optimiser, Stepper
from gradveil.attacks.search.update_equations import update_rows
from gradveil.gradients.functional import Form
from gradveil.models import build
from gradveil.types import Observation, Update

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def observe(model: nn.Module, count: int = 3) -> list[Observation]:
    rng = torch.Generator().manual_seed(0)
    like = next(model.parameters())
    seen = []
    for _ in range(count):
        x = torch.rand(1, 3, 32, 32, generator=rng).to(like)
        y = torch.randint(10, (1,), generator=rng).to(like.device)
        found = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
        gradient = {n: g for (n, _), g in zip(model.named_parameters(), found, strict=True)}
        seen.append(Observation(model, Update(gradient), (3, 32, 32), 10))
    return seen


def walked(device: str, form: Form, optimiser: Optimiser) -> Stepper:
    seen = observe(build("lenet", (3, 32, 32), 10).double().to(device))
    unknowns = Unknowns.of(seen[0])
    adam = isinstance(optimiser, Adam)
    objective = MatchingObjective(
        Matching.of(seen, form), unknowns, None, cosine_distance if adam else squared_distance,
        (TotalVariation(1e-4),) if adam else (),
    )  # fmt: skip
    start = torch.rand(3, unknowns.size, generator=torch.Generator().manual_seed(1)).double().to(device)
    stepper = Stepper(objective, optimiser, optimiser.start(start))
    for k in range(25):
        stepper.step(k)
    return stepper


@pytest.mark.parametrize("form", ["manual", "vmap"])
@pytest.mark.parametrize("optimiser", [LBFGS(8), LBFGS(8, search=False), Adam(25, signed=True, boxed=3072)])
def test_the_captured_tick_goes_the_way_of_the_cpu(form: Form, optimiser: Optimiser) -> None:
    here, there = walked("cpu", form, optimiser), walked("cuda", form, optimiser)
    assert there.graph is not None
    torch.testing.assert_close(there.state["best_value"].cpu(), here.state["best_value"], rtol=1e-5, atol=0)
    torch.testing.assert_close(there.state["best"].cpu(), here.state["best"], rtol=0, atol=1e-4)


def test_a_whole_attack_runs_there_and_brings_tensors_back_on_the_device() -> None:
    seen = observe(build("lenet", (3, 32, 32), 10).cuda())
    found = build_attack("dlg:steps=60,restarts=2").reconstruct_many(
        seen, [torch.Generator().manual_seed(i) for i in range(3)]
    )
    assert all(f.inputs.is_cuda for f in found)
    assert sum(f.details["relative_residual"] < 1e-4 for f in found) >= 2


def test_the_captured_conjugate_gradients_go_the_way_of_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        seen = [replace(s, labels=torch.tensor([1])) for s in observe(build("lenet", (3, 32, 32), 10).to(device), 2)]
        prior = Prior.of(seen[0], 10, torch.device(device))
        rows = update_rows(seen, prior.mean.new_zeros(2, 1, 10), prior)
        z = prior.center().expand(2, -1) + 0.1 * prior.draw(2, torch.Generator().manual_seed(3))
        width, weights = z.new_full((2,), 0.3), (0.3 * rows.rms).square().reciprocal()
        step = MatrixFree(prior, iterations=15)(rows, z, rows.residual(z, width), weights, width)
        found.append(step(z.new_ones(2)).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5 * float(found[0].abs().max()))


def test_a_captured_single_problem_of_several_examples_goes_the_way_of_the_cpu() -> None:
    values = []
    for device in ("cpu", "cuda"):
        model = build("resnet18:width=4", (3, 32, 32), 10).double().to(device).train()
        seen = [replace(s, update=replace(s.update, num_examples=2)) for s in observe(model, 1)]
        unknowns = Unknowns.of(seen[0])
        adam = Adam(12, boxed=unknowns.pixels)
        objective = MatchingObjective(Matching.of(seen), unknowns, None, cosine_distance)
        start = torch.rand(1, unknowns.size, generator=torch.Generator().manual_seed(1)).double().to(device)
        stepper = Stepper(objective, adam, adam.start(start))
        for k in range(8):
            stepper.step(k)
        assert (stepper.graph is not None) == (device == "cuda")
        values.append(stepper.state["best_value"].cpu())
    torch.testing.assert_close(values[1], values[0], rtol=1e-6, atol=0)
