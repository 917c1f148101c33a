import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.testing import assert_close

from defenses import slow_reading
from gradveil.federated.client import step_gradient
from gradveil.protection.defense import build
from gradveil.protection.passes import Report
from gradveil.types import Batch


def test_without_a_defence_it_is_the_gradient_of_the_mean_loss(model: nn.Module, batch: Batch, rng: Generator) -> None:
    found = step_gradient(model, batch, build("none"), rng)
    assert list(found) == [name for name, _ in model.named_parameters()]
    for name, g in slow_reading.plain_gradient(model, batch).items():
        assert torch.equal(found[name], g)


def test_it_equals_algorithm_2_in_train_and_in_eval_mode(model: nn.Module, batch: Batch, rng: Generator) -> None:
    expected = slow_reading.algorithm_2(model, 5, batch, 0.4)  # type: ignore[arg-type]
    for mode in (True, False):
        found = step_gradient(model.train(mode), batch, build("representation:share=0.4"), rng)
        assert_close(found["5.weight"], expected)


def test_it_leaves_no_hook_no_gradient_and_no_trace_in_the_random_state(batch: Batch, rng: Generator) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 5))
    torch.manual_seed(4)
    F.cross_entropy(model(batch.inputs), batch.labels)
    after = torch.get_rng_state()
    torch.manual_seed(4)
    step_gradient(model, batch, build("representation+gaussian"), rng)
    assert torch.equal(torch.get_rng_state(), after)  # as a plain pass leaves it: dropout draws from it
    assert not model[2]._forward_hooks
    assert all(p.grad is None for p in model.parameters())


def test_frozen_weights_are_left_out_and_unused_ones_are_zero(model: nn.Module, batch: Batch, rng: Generator) -> None:
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    found = step_gradient(model, batch, build("representation"), rng)
    assert "0.weight" not in found
    assert torch.equal(found["idle"], torch.zeros(2))


def test_another_loss_can_be_given_and_reports_add_up(model: nn.Module, batch: Batch, rng: Generator) -> None:
    def halved(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) / 2

    report = Report()
    whole = step_gradient(model, batch, build("representation"), rng, report=report)
    half = step_gradient(model, batch, build("representation"), rng, loss=halved, report=report)
    assert_close(half["5.weight"], whole["5.weight"] / 2)
    assert (report.steps, report.examples, report.removed) == (2, 6, 2 * 3 * 26)
    assert "2 steps defended, 0 not; 156 live entries removed of 156 asked" in str(report)
    assert report.summary()["removed"] == 156


def test_a_gradient_is_returned_where_gradients_are_off(model: nn.Module, batch: Batch, rng: Generator) -> None:
    expected = step_gradient(model, batch, build("representation"), rng)
    with torch.no_grad():
        found = step_gradient(model, batch, build("representation"), rng)
    assert torch.equal(found["5.weight"], expected["5.weight"])
