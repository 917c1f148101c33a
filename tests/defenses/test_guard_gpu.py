import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, nn
from torch.testing import assert_close

from defenses.loops import REPRESENTATION, train, weights_of
from gradveil.errors import DefenseError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.protect import protect
from gradveil.types import Batch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize(
    "spec", [REPRESENTATION, "random_mask", "representation:layer=2", "pruning:share=0.5", "gaussian", "decoy",
             "representation_authors", "representation_direction"],
)  # fmt: skip
def test_a_guarded_loop_is_the_same_on_the_gpu(spec: str, model: nn.Module, batch: Batch) -> None:
    there = copy.deepcopy(model).cuda()
    with protect(model, spec, simulated=Generator().manual_seed(1)) as here_guard:
        train(model, model, batch)
    with protect(there, spec, simulated=Generator().manual_seed(1)) as there_guard:
        train(there, there, Batch(batch.inputs.cuda(), batch.labels.cuda()))
    for name, w in weights_of(model).items():
        assert_close(weights_of(there)[name].cpu(), w, rtol=1e-3, atol=1e-4)
    assert there_guard.report.removed == here_guard.report.removed
    assert there_guard.report.steps == 3


def test_dropout_on_the_gpu_draws_the_masks_of_the_pass(batch: Batch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Dropout(0.5), nn.Linear(20, 5)).cuda()
    x, y = batch.inputs.cuda(), batch.labels.cuda()
    kept: list[torch.Tensor] = []
    model[2].register_forward_hook(lambda m, args, out: kept.append(out.detach()))
    with protect(model, REPRESENTATION) as guard:
        F.cross_entropy(model(x), y).backward()
    live = kept[0].count_nonzero(1)
    assert all(torch.equal(r == 0, kept[0] == 0) for r in kept)
    assert len(kept) > 1
    assert guard.report.removed == int(live.clamp(max=8).sum())


def test_half_precision_on_the_gpu_keeps_the_mask(model: nn.Module, batch: Batch) -> None:
    model, one = model.cuda(), Batch(batch.inputs[:1].cuda(), batch.labels[:1].cuda())
    full = step_gradient(model, one, build(REPRESENTATION), Generator())["5.weight"]
    scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=128.0), torch.optim.SGD(model.parameters(), lr=0.0)
    with protect(model, REPRESENTATION):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(one.inputs), one.labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    found = model[5].weight.grad  # type: ignore[index]
    assert torch.equal((found == 0).all(0), (full == 0).all(0))
    assert_close(found, full, rtol=0.05, atol=0.01)


def test_noise_before_a_fused_step_asks_for_unscaling_first(model: nn.Module, batch: Batch) -> None:
    model, x, y = model.cuda(), batch.inputs.cuda(), batch.labels.cuda()
    for unscale in (False, True):
        scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.Adam(model.parameters(), fused=True)
        guard = protect(model, "gaussian")
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
        else:
            with pytest.raises(DefenseError, match="unscale_"):
                scaler.step(optimizer)
        guard.remove()
