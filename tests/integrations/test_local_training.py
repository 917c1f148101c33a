import copy

import pytest
import torch
from torch import nn

from gradveil.errors import DefenseError
from gradveil.federated.client import step_gradient
from gradveil.integrations.local_training import defended, is_trained
from gradveil.protection.defense import build
from gradveil.protection.protect import guard_of
from gradveil.types import Batch

LR = 0.1


def train(model: nn.Module, batch: Batch) -> str:
    loss = nn.functional.cross_entropy(model(batch.inputs), batch.labels)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return "trained"


def test_one_line_defends_a_training_function(model: nn.Module, batch: Batch, rng: torch.Generator) -> None:
    spec = "representation:share=0.5"
    before = copy.deepcopy(model)
    expected = step_gradient(copy.deepcopy(model), batch, build(spec), rng)

    assert defended(spec)(train)(model, batch) == "trained"

    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before.state_dict()[name] - LR * expected[name])
    assert guard_of(model) is None


def test_a_defence_of_the_update_acts_after_the_training(model: nn.Module, batch: Batch) -> None:
    before = copy.deepcopy(model.state_dict())
    plainly = copy.deepcopy(model)
    train(plainly, batch)

    defended("pruning:share=0.75,on=update", lr=LR)(train)(model, batch=batch)

    change = model.state_dict()["5.weight"] - before["5.weight"]
    whole = plainly.state_dict()["5.weight"] - before["5.weight"]
    kept = change != 0
    assert int(kept.sum()) == whole.numel() // 4
    torch.testing.assert_close(change[kept], whole[kept])


def test_noise_on_the_update_is_in_units_of_the_gradient(model: nn.Module, batch: Batch) -> None:
    before = copy.deepcopy(model.state_dict())
    defended("gaussian:scale=10,on=update", lr=LR, simulated=torch.Generator().manual_seed(1))(train)(model, batch)
    change = torch.cat([(model.state_dict()[n] - before[n]).flatten() for n in before])
    assert float(change.std()) == pytest.approx(10 * LR, rel=0.15)


def test_two_calls_draw_different_noise(model: nn.Module, batch: Batch) -> None:
    other = copy.deepcopy(model)
    noisy = defended("gaussian:scale=1", lr=LR)(train)
    noisy(model, batch)
    noisy(other, batch)
    assert not torch.equal(model.state_dict()["5.bias"], other.state_dict()["5.bias"])


def test_a_function_that_goes_round_the_defence_is_refused(model: nn.Module, batch: Batch) -> None:
    def bypass(model: nn.Module, batch: Batch) -> None:
        nn.functional.cross_entropy(model.forward(batch.inputs), batch.labels).backward()

    with pytest.raises(DefenseError):
        defended("representation")(bypass)(model, batch)
    assert guard_of(model) is None


def test_a_function_that_does_not_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(DefenseError, match="No training step"):
        defended("representation")(lambda model: None)(model)


def test_a_function_without_a_model_is_refused(batch: Batch) -> None:
    with pytest.raises(DefenseError, match=r"nn\.Module"):
        defended("representation")(lambda x: x)(batch)


def test_statistics_and_counters_are_told_from_weights() -> None:
    state = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)).state_dict()
    assert [n for n, v in state.items() if is_trained(n, v)] == ["0.weight", "0.bias", "1.weight", "1.bias"]
