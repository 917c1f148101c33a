import copy
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from defenses.loops import REPRESENTATION, by_step_gradient, train, weights_of
from gradveil.defenses.representation import RandomMask
from gradveil.errors import DefenseError
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.protect import protect
from gradveil.types import Batch


def test_two_optimizers_may_share_one_pass(model: nn.Module, batch: Batch) -> None:
    body = torch.optim.SGD(model[:5].parameters(), lr=0.1)  # type: ignore[index]
    head = torch.optim.SGD(model[5].parameters(), lr=0.1)  # type: ignore[index]
    with protect(model, REPRESENTATION) as guard:
        for _ in range(2):
            body.zero_grad()
            head.zero_grad()
            F.cross_entropy(model(batch.inputs), batch.labels).backward()
            body.step()
            head.step()
    assert (guard.report.steps, guard.report.optimizer_steps) == (2, 4)


def test_an_optimizer_of_another_model_changes_nothing_here(model: nn.Module, batch: Batch) -> None:
    other = copy.deepcopy(model)
    with protect(model, "pruning:share=1") as guard:
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        before = model[5].weight.grad.clone()  # type: ignore[index, union-attr]
        train(other, other, batch)
        assert torch.equal(model[5].weight.grad, before)  # type: ignore[index]
        assert guard.report.optimizer_steps == 0
    assert not torch.equal(weights_of(other)["5.weight"], weights_of(model)["5.weight"])


@pytest.mark.parametrize("by_keyword", [True, False])
def test_gradients_made_by_a_closure_are_defended_inside_the_step(
    by_keyword: bool, model: nn.Module, batch: Batch
) -> None:
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.inputs), batch.labels)
        loss.backward()
        return loss

    with protect(model, "pruning:share=0.5") as guard:
        for _ in range(3):
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    by_step_gradient(reference, batch, "pruning:share=0.5", Generator())
    for name, w in weights_of(reference).items():
        assert_close(weights_of(model)[name], w)
    assert guard.report.steps == 3


def test_a_second_step_on_the_same_gradient_is_not_defended_twice(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with protect(model, REPRESENTATION + "+gaussian:scale=1"):
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()
        first = model[5].weight.grad.clone()  # type: ignore[index, union-attr]
        optimizer.step()
        assert torch.equal(model[5].weight.grad, first)  # type: ignore[index]


def test_a_gradient_still_scaled_for_half_precision_is_refused(model: nn.Module, batch: Batch) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.grad_scale = torch.tensor(1024.0)  # as GradScaler leaves it on a fused optimizer
    with protect(model, "gaussian"):
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        with pytest.raises(DefenseError, match="unscale_"):
            optimizer.step()
        model.zero_grad()
        optimizer.grad_scale = None
        F.cross_entropy(model(batch.inputs), batch.labels).backward()
        optimizer.step()


def test_mixed_precision_keeps_the_mask_of_full_precision(model: nn.Module, batch: Batch) -> None:
    full = step_gradient(model, Batch(batch.inputs[:1], batch.labels[:1]), build(REPRESENTATION), Generator())
    with protect(model, REPRESENTATION) as guard:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(batch.inputs[:1]), batch.labels[:1])
        loss.backward()
        found = model[5].weight.grad  # type: ignore[index]
    assert guard.report.removed == guard.report.asked == round(0.4 * 64)
    assert torch.equal((found == 0).all(0), (full["5.weight"] == 0).all(0))
    assert_close(found, full["5.weight"], rtol=0.05, atol=0.01)


class Looks(RandomMask):
    """Notes in which precision it is asked."""

    seen: ClassVar[list[tuple[bool, torch.dtype]]] = []

    def perturb(self, model: nn.Module, layer: str, x: Tensor, r: Tensor, rng: Generator) -> Tensor:
        self.seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
        return super().perturb(model, layer, x, r, rng)


def test_under_mixed_precision_the_defence_is_asked_in_full_precision(model: nn.Module, batch: Batch) -> None:
    with protect(model, Looks()), torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch.inputs.bfloat16())
    assert Looks.seen == [(False, torch.float32)]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile's own, on any graph break
@pytest.mark.parametrize("how", ["torch.compile", "in place"])
@pytest.mark.parametrize("order", ["guard first", "compiled first"])
def test_a_compiled_model_is_defended_like_a_plain_one(how: str, order: str, model: nn.Module, batch: Batch) -> None:
    expected = step_gradient(model, batch, build(REPRESENTATION), Generator())
    torch.compiler.reset()
    guard = protect(model, REPRESENTATION) if order == "guard first" else None
    run: Any = model
    if how == "torch.compile":
        run = torch.compile(model, backend="aot_eager")
    else:
        model.compile(backend="aot_eager")
    if guard is None:
        run(batch.inputs)  # traced without the guard
        guard = protect(run, REPRESENTATION)
    F.cross_entropy(run(batch.inputs), batch.labels).backward()
    guard.remove()
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name])
    assert guard.report.steps == 1
    assert guard.report.removed == 3 * round(0.4 * 64)
    run(batch.inputs)
    assert guard.report.steps == 1  # compiled code may still call the hooks: they do nothing


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_code_compiled_before_the_guard_and_behind_its_back_is_refused(model: nn.Module, batch: Batch) -> None:
    torch.compiler.reset()
    run = torch.compile(model, backend="eager")
    run(batch.inputs)
    with pytest.raises(DefenseError, match="compiled"), protect(model, REPRESENTATION):
        train(run, model, batch)


@pytest.mark.parametrize("spec", [REPRESENTATION, "pruning:share=0.5", "gaussian:scale=0.5"])
def test_a_loss_scaled_for_half_precision_is_defended_in_its_true_units(
    spec: str, model: nn.Module, batch: Batch
) -> None:
    reference = copy.deepcopy(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with protect(model, spec, simulated=Generator().manual_seed(1)):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(batch.inputs), batch.labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    by_step_gradient(reference, batch, spec, Generator().manual_seed(1))
    for name, w in weights_of(reference).items():
        assert_close(weights_of(model)[name], w)
